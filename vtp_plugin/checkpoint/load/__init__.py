"""Reading the elements of a checkpoint with torch, for another layout than the one that wrote it."""
