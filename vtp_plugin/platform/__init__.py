"""The device that a run trains on: NVIDIA (NCCL), Ascend (HCCL) or the host itself (gloo).

Words:
    accelerator: a GPU or an NPU.
    backend: torch's, for communication: nccl, hccl or gloo.
    installed: the platform's stand-ins are in place; only the CPU has some.
"""
