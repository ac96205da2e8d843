"""What crosses from one pipeline stage to the next, as data. Pure: no torch, no processes.

Each module answers one question: ``sharding`` (which rank holds which part of a tensor), ``endpoint`` (which ranks of a
stage take part in a boundary), ``boundary_plan`` (which messages carry a tensor to the other stage), ``strategies``
(who makes the plan, and which strategy does a boundary take), ``check_boundary`` (is a plan right), ``header`` (what
goes before a tensor), ``portions`` (what can be passed on before all has come), ``channel_spec`` (what is a channel),
``pipeline_boundaries`` (which boundaries does a pipeline have), ``local_slices`` (where a part of it is in memory),
``bridge_endpoint`` and ``bridge_spec`` (what crosses between modules of different grids), ``tied_channels`` (where does
a shared embedding cross), ``message_kind`` (what is sent at all).

Words:
    box: half-open index interval for every dimension of a whole tensor (``Box``).
    sharding: which boxes each rank holds (``Sharding``, with ``LocalBoxes`` for each rank), as a ``DTensor`` has it.
    copy: the same boxes on several ranks (``Sharding.copies``).
    finish: a collective inside the receiving stage; a start is one inside the sending stage (``Collective``).
    kind of message: what a message holds, such as a gradient; the list is closed (``MessageKind``).
    header: a small vector of int64 that says what the tensor behind it is.
    portion: a part of a message that is swapped while the rest is under way.
    unit: the largest piece of a batch of which both ends of a bridge hold whole ones on every replica.
"""
