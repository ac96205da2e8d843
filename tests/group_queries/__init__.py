"""Who asks the groups of an unequal run for their ranks, size, place or identity: a recorder, a finder, a table.

Megatron was written for groups that are alike on all stages. Each of its functions that asks such a question is in the
table with what it gets from the plugin and what would be true. ``recorder`` sees the questions while the tests train,
``finder`` finds those that no test reaches in Megatron's sources.
"""
