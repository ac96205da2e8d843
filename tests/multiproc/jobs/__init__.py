"""What ranks do: functions that the pool calls by name, ``tests.multiproc.jobs.NAME:function``, and whole programs."""
