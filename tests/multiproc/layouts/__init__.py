"""Which ranks a stage has: replicas that differ, grids, groups, and who asks for them."""
