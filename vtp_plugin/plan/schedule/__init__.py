"""When things happen: what each worker computes, sends and receives, in which order. Pure: no torch, no processes.

Every folder answers one question and imports only those before it: ``order`` (what is an order), ``proof`` (is it
right), ``cost`` (how long does it take), then ``make`` (how is it made).

Words:
    leg: the forward or the backward of one virtual stage, on the route of a microbatch.
    compute: a forward or a backward, without communication.
    joint: a compute in which several replicas wait for each other, since a collective inside it spans them.
    lowered: with the communication, as an executor runs it.
    limit: how many microbatches a worker may have in flight.
    tree: virtual stages of which one takes the outputs of several others, where modules make one model.
    lookahead: for how many computes receives are posted ahead.
    timeline: when everything in a step happens (``Timeline``).
"""
