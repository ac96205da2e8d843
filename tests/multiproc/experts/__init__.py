"""Mixtures of experts, with sizes of their own for each stage."""
