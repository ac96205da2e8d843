"""How one tensor crosses: channels, the transfers of a plan, the collectives of its start and finish, handles.

Words:
    form: type of a tensor that crosses, and how ranks hold it (``TensorFormat``).
    parcel: what one rank sends and receives of one tensor.
    landing: memory that a tensor arrives in, and what is still to be done to it (``Landing``).
    take: wait for a tensor, finish its plan, and have it; once.
"""
