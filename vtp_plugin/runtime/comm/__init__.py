"""How one tensor crosses: channels, the transfers of a plan, the collectives of its start and finish, handles.

Words:
    form: type of a tensor that crosses, and how ranks hold it (``TensorFormat``).
    transmission: one tensor that crosses: its plan, its type, and its name for error messages (``Transmission``).
    pending: a receive that is posted: the memory it fills, and the finish that completes it (``PendingRecv``).
    take: wait for a tensor, run its plan's finish, and return it; once for each receive.
"""
