"""What every room may stand on: the log, files of others, undoable assignments, boxes, values and flags of options,
MindSpeed's adaptor.

Words:
    box: an index interval for every dimension of a tensor.
    stack: assignments that can be undone, the last one first (``UndoStack``).
    reporter: a rank whose lines of level INFO are seen; one of every site.
    adaptor: MindSpeed's module whose import patches Megatron.
"""
