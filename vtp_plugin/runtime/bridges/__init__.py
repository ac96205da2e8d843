"""Bridges between modules with grids of their own, on ranks apart or on the same ones."""
