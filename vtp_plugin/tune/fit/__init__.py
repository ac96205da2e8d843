"""A list for the cards that a run has: what it must satisfy, as a search problem, and the best one as flags.

``available_cards`` has the nodes and their cards, ``constraints`` what a list must satisfy, ``options_of_run`` reads
that from a run's arguments. ``fit_problem`` states which list uses the most cards, for :mod:`vtp_plugin.tune.search` to
solve, ``fit_layout`` chooses one, and ``reasons`` says why no better one was possible. ``as_flags`` writes a list as
flags, and ``rank_assignment`` gives each card its rank.

Words:
    card: one device; a rank that has none, or a bad one, is spare.
    spare: a card, or its rank, that the run does without.
    node: the cards of one machine, or of one agent of the launcher.
    chosen: a list of sizes with its layers and replicas, as ranks send it to each other (``Chosen``).
    pool: the nodes of one site.
"""
