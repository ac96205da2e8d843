"""Runs of two sites that do not trust each other: what crosses, and what an attacker at the other one cannot do."""
