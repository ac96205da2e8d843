"""Reading the elements of a checkpoint with torch, for another layout than the one that wrote it.

What is cut anew here is the optimizer. Weights are cut anew by Megatron's own ``megatron.core.dist_checkpointing``: it
stores whole tensors, in pieces, and reads from them what each rank needs.
"""
