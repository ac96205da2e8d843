"""The files of a checkpoint, read and checked without torch."""
