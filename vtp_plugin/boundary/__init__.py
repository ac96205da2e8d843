"""What crosses from one pipeline stage to the next, as data. Pure: no torch, no processes.

Each module answers one question: ``spread`` (which rank holds which part of a tensor), ``plan`` (which messages carry
it to the other stage), ``check`` (is a plan right), ``rules`` (which strategy does a boundary take), ``pipeline``
(which boundaries and channels has a pipeline), ``cargo`` (what is sent at all), ``draw`` and ``arrange`` (what does it
look like).
"""
