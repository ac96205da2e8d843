"""Pipelines that begin and end on the edge, and planned schedules."""
