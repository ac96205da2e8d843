"""A list for the cards that a run has: what it must satisfy, as a search problem, and the best one as flags.

``constraints`` says what a list must satisfy. ``fit_layout`` states which list uses the most cards, for
:mod:`vtp_plugin.tune.search` to solve, chooses one, says why no better one was possible, and gives each card its rank.

Words:
    card: one device; a rank that has none, or a bad one, is spare.
    spare: a card, or its rank, that the run does without.
    node: the cards of one machine, or of one agent of the launcher.
    chosen: a list of sizes with its layers and replicas, as ranks send it to each other (``Chosen``).
    pool: the nodes of one site.
"""
