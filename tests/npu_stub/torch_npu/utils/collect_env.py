"""Stands for torch_npu.utils.collect_env."""


def get_cann_version() -> str:
    """Return an empty version: there is no CANN."""
    return ""
