"""Writing a checkpoint: by one run per folder, atomically, with hashes."""
