"""What crosses from one pipeline stage to the next, as data. Pure: no torch, no processes.

Each module answers one question: ``endpoint`` (which ranks of a stage take part in a boundary, and which part of a
tensor does each hold), ``boundary_plan`` (which messages carry a tensor to the other stage, and what is one rank's part
in it), ``strategies`` (who makes the plan, and which strategy does a boundary take), ``check_boundary`` (is a plan
right), ``channel_spec`` (which boundaries does a pipeline have, and which channels), ``bridge_spec`` (what crosses
between modules of different grids), ``message_kind`` (what is sent at all, and what goes before a tensor).

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
