"""What a rank holds: the weights of its layers, their gradients, and the state of the optimizer; arithmetic only."""
