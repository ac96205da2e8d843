"""Machines, their cards and links, as a file says them; what layers take on them, measured or from data sheets.

``read_cluster`` reads the file into ``machines``; ``durations`` says what parts of a model take on a card,
``stage_memory`` what a stage holds.

Words:
    part: of a model, with a time of its own: a dense layer, one with experts, the embedding, the head.
    card: a kind of device, with what is known of it.
    batch: a microbatch, and how its numbers are kept.
"""
