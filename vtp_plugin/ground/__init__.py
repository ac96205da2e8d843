"""What every room may stand on: the log, undoable assignments, values and flags of options, MindSpeed's adaptor."""
