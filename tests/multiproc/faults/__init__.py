"""Runs under launchers that are disturbed: ranks, agents and networks that fail, and what the logs then must show."""
