"""Is an order right? Every compute once, every message paired, no deadlock, the limits kept."""
