"""What every package may import: the log, texts and files of others, undoable assignments, boxes.

Words:
    box: an index interval for every dimension of a tensor.
    stack: assignments that can be undone, the last one first (``UndoStack``).
    reporter: a rank whose lines of level INFO are seen; one of every site.
"""
