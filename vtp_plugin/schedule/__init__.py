"""When things happen: what each worker computes, sends and receives, in which order. Pure: no torch, no processes.

Every folder answers one question and imports only those before it: ``order`` (what is an order), ``proof`` (is it
right), ``cost`` (how long does it take), then ``make`` (how is it made) and ``pictures`` (what does it look like),
which do not import each other.
"""
