"""What the scripts of examples/recipes start: they are run with a launcher that only prints its words."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.rules.launcher_commands import environment
from tests.support.hosts import ROOT

RECIPES = ROOT / "examples" / "recipes"
_LAUNCHER = "#!/bin/sh\nprintf '%s\\0' \"$@\"\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe in one layout.

    Attributes:
        folder: in ``examples/recipes``.
        model: name of its model in ``tests/golden/published_configs.json``.
        scripts: that every node starts, in the order of their numbers.
        memory_gib: of a GPU of each node.
        layout: value of LAYOUT; empty where there is one layout.
        base_model: value of BASE_MODEL; empty where there is one model.
    """

    folder: str
    model: str
    scripts: tuple[str, ...] = ("train.sh", "train.sh")
    memory_gib: tuple[int, ...] = (80, 80)
    layout: str = ""
    base_model: str = ""

    def __str__(self) -> str:
        return " ".join((self.folder, self.layout or self.base_model)).strip()

    def variables(self, node: int) -> dict[str, str]:
        """Give the variables with which a node starts its script."""
        given = {"NODE_RANK": str(node), "MASTER_ADDR": "10.0.0.1"}
        chosen = {"LAYOUT": self.layout, "BASE_MODEL": self.base_model}
        return given | {name: value for name, value in chosen.items() if value}


ALL = (
    Recipe(folder="llama-3.1-8b", model="Llama 3.1 8B", layout="two-nodes"),
    Recipe(folder="llama-3.1-8b", model="Llama 3.1 8B", layout="old-and-new", memory_gib=(80, 40)),
    Recipe(folder="qwen-3-30b-a3b", model="Qwen 3 30B A3B", layout="two-nodes"),
    Recipe(folder="qwen-3-30b-a3b", model="Qwen 3 30B A3B", layout="old-and-new", memory_gib=(40, 80)),
    Recipe(folder="qwen-2.5-32b-u", model="Qwen 2.5 32B", scripts=("edge.sh", "cloud.sh")),
    *(
        Recipe(folder="lora-u", model=model, scripts=("edge.sh", "cloud.sh"), memory_gib=(24, 80), base_model=name)
        for model, name in (("Llama 3.1 8B", "llama-3.1-8b"), ("Qwen 2.5 32B", "qwen-2.5-32b"))
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a node starts.

    Attributes:
        launcher: words of torchrun.
        script: the training script.
        words: of the training script.
    """

    launcher: tuple[str, ...]
    script: str
    words: tuple[str, ...]

    @property
    def num_processes(self) -> int:
        """Number of processes on this node."""
        return int(self.launcher[self.launcher.index("--nproc-per-node") + 1])


def started(recipe: Recipe, node: int, folder: Path, **variables: str) -> Start:
    """Run the script of a node with a launcher that prints its words.

    Args:
        recipe: the recipe.
        node: number of the node.
        folder: an empty folder for the launcher.
        variables: of the environment, besides.
    """
    launcher = folder / "torchrun"
    launcher.write_text(_LAUNCHER)
    launcher.chmod(0o755)
    known = environment(**{**recipe.variables(node), "PYTHON": launcher, **variables})
    script = RECIPES / recipe.folder / recipe.scripts[node]
    done = subprocess.run(
        [script], env={**known, "PATH": f"{folder}:{known['PATH']}"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("\0")[:-1]
    if words[:2] == ["-m", "torch.distributed.run"]:
        words = words[2:]
    end = words.index("-m")
    assert words[end : end + 3] == ["-m", "vtp_plugin", "run"], words
    return Start(launcher=tuple(words[:end]), script=words[end + 3], words=tuple(words[end + 4 :]))
