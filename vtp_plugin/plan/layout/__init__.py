"""The layout: which rank belongs to which stage. Pure: no torch, no Megatron, no global state.

Each module answers one question: ``pipeline_layout`` (which rank belongs to which stage, is a list of sizes possible,
and how is that written for people), ``replica_map`` (which replicas of two stages work together), ``stage_grid`` (which
ranks has one stage), ``layer_lists`` (which layers does a stage hold), ``grids`` (which ranks differ along which
dimension, and which process groups does Megatron make of it).

Words:
    sizes: how many ranks a stage has along tp, cp, dp and pp, and its experts along etp, ep and dp.
    coordinates: where a rank is along these (``Coord``).
    rank order: which coordinate changes first from rank to rank: stage-major or replica-major (``RankOrder``).
    mode: how stages of different dp sizes work together, multiplex or split (``DpMode``).
    share: a rank's part of something that several ranks hold once together (``RankShare``).
    ring: one way of a microbatch from the edge through the cloud and back.
"""
