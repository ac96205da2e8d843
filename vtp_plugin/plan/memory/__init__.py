"""What a rank holds: the weights of its layers, their gradients, and the state of the optimizer; arithmetic only.

Words:
    parameter: one tensor of weights, as long as this rank holds it.
    kept: what a forward stores for its backward.
    routed: of experts to which a router sends tokens; shared ones get all tokens.
"""
