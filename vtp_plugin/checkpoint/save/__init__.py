"""How a checkpoint is written: one run in a folder, there as a whole or not at all, hashed."""
