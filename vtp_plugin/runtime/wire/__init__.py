"""How one tensor crosses: channels, the transfers of a plan, the collectives of its start and finish, handles."""
