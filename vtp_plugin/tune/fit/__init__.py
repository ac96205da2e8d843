"""Which list of sizes fits the cards that are there: one pure function, and what it is made of.

``available_cards`` has the nodes and their cards, ``constraints`` what a list must satisfy, ``fit_search`` has
:mod:`vtp_plugin.tune.search` find lists, ``fit_layout`` chooses one, and ``reasons`` says why no better one was
possible.

Words:
    card: one device; a rank that has none, or a bad one, is spare.
    spare: a card, or its rank, that the run does without.
    node: the cards of one machine, or of one agent of the launcher.
    fitted: a list of sizes with its layers and replicas, and the cards of each stage (``Fitted``).
    pool: the nodes of one site.
"""
