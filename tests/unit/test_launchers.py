"""The commands that ``doctor`` prints are those of the guide."""

from __future__ import annotations

from tests.import_rules import ROOT
from vtp_plugin.runtime.life.launchers import COMMANDS, describe_launchers


def test_the_guide_has_each_command() -> None:
    guide = (ROOT / "docs" / "lost-cards.md").read_text()
    for command in COMMANDS.values():
        assert "\n".join(("```sh", *command, "```")) in guide


def test_what_the_variable_means_is_said() -> None:
    assert describe_launchers({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})[-1].endswith("as elastic torchrun needs it")
