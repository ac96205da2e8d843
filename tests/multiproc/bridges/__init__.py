"""Modules of different grids, joined."""
