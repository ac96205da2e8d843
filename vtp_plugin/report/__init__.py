"""Pictures of plans, and what a run recorded beside what was planned."""
