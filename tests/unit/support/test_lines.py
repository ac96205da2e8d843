"""Our error line is found wherever it stands in what a rank printed."""

from __future__ import annotations

from tests.support.lines import error_line, error_lines

OUTPUT = """\
building a model
[rank1]: [vtp rank 1] error: tensor_model_parallel_size=1, but stage 1 has 2; build the config with 2
WARNING:megatron.core.utils: fallback
[W1121 21:35:08.1 TCPStore.cpp:125] [c10d] recvValue failed
"""


def test_a_line_of_another_library_may_come_last() -> None:
    line = "[vtp rank 1] error: tensor_model_parallel_size=1, but stage 1 has 2; build the config with 2"
    assert error_line(OUTPUT) == line
    assert error_lines(f"half a line{OUTPUT}[vtp] error: bad") == [line, "[vtp] error: bad"]
    assert error_line("all is well") == ""
