"""Machines, their cards and links, as a file says them; what layers take on them, measured or from data sheets.

``read`` reads the file into ``machines``; ``durations`` says what parts of a model take on a card, ``memory`` what a
stage holds.

Words:
    part: of a model, with a time of its own: a dense layer, one with experts, the embedding, the head.
    wire: between two cards, with its latency and bandwidth.
    source: of a time: measured, fitted to what was measured, or from a data sheet.
"""
