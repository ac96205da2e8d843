"""How one step runs: links, the executor, what is measured, tied weights and sums of gradients."""
