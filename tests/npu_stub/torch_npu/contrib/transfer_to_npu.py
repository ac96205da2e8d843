"""Stands for transfer_to_npu, which maps torch.cuda onto the NPU: the CPU platform has mapped it onto the CPU."""
