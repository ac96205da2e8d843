"""What is known of the Megatron that a run uses, without importing it: versions, rules for its options, patching.

Words:
    host: a family of Megatron versions that the same patches carry.
    adaptor: MindSpeed's module whose import patches Megatron.
"""
