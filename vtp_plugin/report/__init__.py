"""Pictures of plans, and what pages of commands hold."""
