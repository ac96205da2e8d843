"""Which list of sizes has the shortest step on nodes whose cards differ, from what layers cost on them: pure functions.

``problem`` says what is asked, in numbers alone, and what is best; ``enumerate_lists`` goes through what the cards
allow, and leaves out what is too slow by ``list_bounds``, ``stage_orders`` puts the stages of a list in order,
``layer_split`` shares out layers, ``node_assignment`` finds nodes (``bin_packing`` if only room counts),
``boundary_cost`` says what boundaries cost by each transport, ``evaluate`` simulates, ``fastest`` does one after the
other, ``stock`` asks the same of Megatron without the plugin.

Words:
    pool: nodes that are alike: one site, one kind of card.
    kind: a stage without its layers: the pools of its replicas, its tensor-parallel size.
    shape: how the samples of a step are shared: replicas, microbatches and their size.
    source: of a time: measured, fitted to what was measured, or from a data sheet.
    bound: a time that no step of a list, or of a split of layers, is below.
    choice: a layout with its simulated step.
"""
