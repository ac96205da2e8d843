"""How one tensor crosses: channels, the transfers of a plan, the collectives of its start and finish, handles.

Words:
    form: type of a tensor that crosses, and how ranks hold it (``TensorFormat``).
    bound channel: a channel and the form of its tensors; all that crosses is sent over one (``BoundChannel``).
    transmission: how tensors of one shape cross, as this rank sees it: compiled once, used for all (``Transmission``).
    pending: a receive that is posted: the memory it fills, and the finish that completes it (``PendingRecv``).
    take: wait for a tensor, run its plan's finish, and return it; once for each receive.
"""
