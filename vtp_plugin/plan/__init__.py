"""Plans as data, and the checks that prove them: layout, boundaries, schedules, memory. Pure: no torch."""
