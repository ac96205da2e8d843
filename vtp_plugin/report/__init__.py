"""Pictures of plans, and traces of runs compared with their plans."""
