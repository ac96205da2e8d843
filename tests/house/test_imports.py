"""The dependency rules hold for every file of the plugin, and the checker finds each kind of breach."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.rules.import_rules import INNER_LAYERS, PURE_PARTS, ROOT, broken_rules, loaded_with, sources

pytestmark = pytest.mark.smoke


def test_every_source_file_is_seen_once() -> None:
    modules = [module for module, _ in sources()]
    assert len(modules) == len(set(modules))
    assert "vtp_plugin.errors" in modules
    assert "vtp_plugin.patches.__init__" in modules


def test_no_file_breaks_a_rule() -> None:
    broken = [line for module, source in sources() for line in broken_rules(module, source)]
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize("package", INNER_LAYERS)
def test_everything_in_a_package_with_layers_has_one(package: str) -> None:
    folder = ROOT.joinpath("vtp_plugin", *package.split("."))
    # What was moved away may have left compiled files behind.
    entries = {path.stem for path in folder.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert entries - {"__init__"} == set().union(*INNER_LAYERS[package])


# What a run loads of parts that are for the hand, and why.
LOADED_TOO = {
    "link": "it is the package of the next one",
    "link.guard": "a run between sites asks who can reach what it listens on",
    "link.run_commands": "it asks by `ip` and `ss`",
    "link.site_file": "the command that it asks with",
    "checkpoint.hf": "it is the package of the next one",
    "checkpoint.hf.hf_model": "a run is compared with the note of the import that it begins with",
}
FOR_THE_HAND = (
    "tune",
    "report",
    "link",
    "cli",
    "checkpoint.hf",
    "checkpoint.tools",
    "functional",
    "adapters",
    "bridge",
)


def test_a_run_loads_what_it_needs() -> None:
    """`import vtp_plugin`, `apply()` and a training run, with any option and any Megatron."""
    modules = [*sources()]
    names = {name.removesuffix(".__init__") for name, _ in modules}
    patches = {name for name in names if name.startswith("vtp_plugin.patches")} - {"vtp_plugin.patches.profile_parts"}
    loaded = loaded_with(["vtp_plugin.api", "vtp_plugin.edge", *patches], modules)
    parts = tuple(f"vtp_plugin.{part}." for part in FOR_THE_HAND)
    found = {name.removeprefix("vtp_plugin.") for name in loaded if f"{name}.".startswith(parts)}
    assert found == LOADED_TOO.keys()


@pytest.mark.parametrize(
    ("module", "source", "rule"),
    [
        ("vtp_plugin.plan.layout.stage_grid", "import torch.distributed as dist", "standard library, not torch"),
        (
            "vtp_plugin.plan.boundary.boundary_plan",
            "def f():\n    from numpy import array",
            "standard library, not numpy",
        ),
        ("vtp_plugin.plan.schedule.proof.check_schedule", "import megatron.core", "standard library, not megatron"),
        ("vtp_plugin.runtime.x", "from megatron.core import parallel_state", "only patches may import megatron"),
        ("vtp_plugin.runtime.x", "import importlib\nimportlib.import_module('megatron.core')", "only patches"),
        ("vtp_plugin.cli", "__import__('megatron')", "only patches"),
        (
            "vtp_plugin.plan.layout.stage_grid",
            "from vtp_plugin.plan.boundary.boundary_plan import plan",
            "plan.layout may import only lower layers",
        ),
        ("vtp_plugin.plan.layout.stage_grid", "from vtp_plugin import report", "not report"),
        ("vtp_plugin.plan.layout.stage_grid", "from ...runtime import x", "not runtime"),
        ("vtp_plugin.plan.layout.__init__", "from ...runtime import x", "not runtime"),
        ("vtp_plugin.plan.boundary.boundary_plan", "from .. import schedule", "not plan.schedule"),
        ("vtp_plugin.runtime.x", "from vtp_plugin import apply", "not __init__"),
        ("vtp_plugin.runtime.x", "import vtp_plugin\nvtp_plugin.apply()", "not __init__"),
        ("vtp_plugin.session", "import vtp_plugin\nprint(vtp_plugin.__version__)", "not __init__"),
        ("vtp_plugin.runtime.comm.x", "from vtp_plugin.runtime.step import links", "not runtime.step"),
        ("vtp_plugin.runtime.x", "import vtp_plugin.patches.core", "not patches"),
        ("vtp_plugin.patches.core.x", "from vtp_plugin.cli import main", "not cli"),
        (
            "vtp_plugin.plan.schedule.order.x",
            "from vtp_plugin.plan.schedule.make.lower import y",
            "lower layers, not plan.schedule.make",
        ),
        ("vtp_plugin.host.rules.checks.x", "from vtp_plugin.host.rules import run_checks", "not host.rules.run_checks"),
        (
            "vtp_plugin.plan.schedule.cost.x",
            "from vtp_plugin.plan.schedule import Schedule",
            "not plan.schedule.Schedule",
        ),
        ("vtp_plugin.plan.schedule.cost.x", "from ..make import x", "not plan.schedule.make"),
        ("vtp_plugin.host.rules.table.x", "import vtp_plugin.config.resolve", "not config"),
        ("vtp_plugin.newpart", "", "has no layer"),
        ("vtp_plugin.runtime.x", "import vtp_plugin.newpart", "not newpart"),
    ],
)
def test_a_breach_is_found(module: str, source: str, rule: str) -> None:
    found = broken_rules(module, source)
    assert len(found) == 1
    assert rule in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("vtp_plugin.patches.core.x", "import megatron.core\nimport torch\nfrom vtp_plugin.runtime import x"),
        ("vtp_plugin.runtime.x", "import torch\nfrom vtp_plugin.util.text import __version__\nfrom .y import z"),
        (
            "vtp_plugin.plan.layout.stage_grid",
            "import math\nfrom vtp_plugin.errors import ConfigError\nfrom . import groups",
        ),
        (
            "vtp_plugin.plan.schedule.make.x",
            "from vtp_plugin.plan.schedule.order import lower\nfrom .choose import make_schedule",
        ),
        ("vtp_plugin.plan.schedule.__init__", "from vtp_plugin.plan.schedule.make.make_schedule import make_schedule"),
        ("vtp_plugin.__init__", "def apply():\n    from vtp_plugin.patches import records"),
        ("vtp_plugin.__main__", "from vtp_plugin.cli import main"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert broken_rules(module, source) == []


@pytest.mark.parametrize("part", [*sorted(PURE_PARTS), "tests.ordering.check", "tests.ordering.overlap"])
def test_pure_part_loads_neither_torch_nor_numpy(part: str) -> None:
    found = [module for module, _ in sources() if f"{module}.".startswith(f"vtp_plugin.{part}.")]
    modules = [module.removesuffix(".__init__") for module in found] or [part]
    code = (
        f"import sys, {', '.join(modules)}\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'numpy', 'megatron'}))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
