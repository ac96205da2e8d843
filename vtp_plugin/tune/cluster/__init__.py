"""A cluster: its machines, cards and links, as a file describes them, and how long layers take on them.

``read_cluster`` reads the file into ``machines``; ``speed`` gives the seconds of a model's parts on a card, and of what
crosses a link.

Words:
    part: of a model, with a time of its own: a dense layer, one with experts, the embedding, the head.
    card: a kind of device, with what is known of it.
    batch: a microbatch, and how its numbers are kept.
"""
