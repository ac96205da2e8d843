"""The functions of Megatron that were called through a wrapper of the fake."""

NAMES: list[str] = []
