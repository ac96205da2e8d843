"""What crosses from one pipeline stage to the next, as data. Pure: no torch, no processes.

Each module answers one question: ``spread`` (which rank holds which part of a tensor), ``side`` (which ranks of a stage
are at a boundary), ``plan`` (which messages carry a tensor to the other stage), ``check`` (is a plan right), ``rules``
(which strategy does a boundary take), ``channel_spec`` (what is a channel), ``pipeline`` (which boundaries does a
pipeline have), ``memory`` (where a part of it is in memory), ``bridge_end`` and ``bridge`` (what crosses between
modules of different grids), ``cargo`` (what is sent at all).

Words:
    box: half-open index interval for every dimension of a whole tensor (``Box``).
    spread: which boxes each rank holds (``Spread``).
    holding: what one rank holds (``Holding``).
    finish: a collective inside the receiving stage; a start is one inside the sending stage (``Collective``).
    cargo: a kind of message that may leave a stage (``Cargo``).
    header: a small vector of int64 that says what the tensor behind it is.
    portion: a part of a message that is swapped while the rest is under way.
"""
