"""What every room may stand on: the log, undoable assignments, values and flags of options, MindSpeed's adaptor.

Words:
    stack: assignments that can be undone, the last one first (``UndoStack``).
    reporter: a rank whose lines of level INFO are seen; one of every site.
    adaptor: MindSpeed's module whose import patches Megatron.
"""
