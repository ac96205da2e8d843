"""The recipes of examples/recipes train with SMALL=1, on their unequal stages as on uniform ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.multiproc.cases.example_runs import start_sites
from tests.multiproc.cases.recipe_cases import ALL, RECIPES, Recipe, started
from tests.multiproc.cases.script_cases import ScriptRun, Scripts, assert_same_training, losses
from tests.rules.launcher_commands import environment
from tests.support.pool import free_port
from vtp_plugin.tune.fit.fit_layout import without

pytestmark = [pytest.mark.needs("scripts_here"), pytest.mark.needs("our_example")]
NUM_STEPS = 3
# What makes the stages unequal. Without it and with one rank on each, Megatron works alone.
LAYOUT = ("--vtp-size-list", "--vtp-ep-list", "--vtp-etp-list", "--num-layer-list", "--vtp-sites", "--vtp-site")
IN_SMALL = {recipe.folder: recipe for recipe in ALL}  # where the layouts of a model are the same in small
DEFAULT, LATER = "llama-3.1-8b", pytest.mark.full


def uniform(words: Sequence[str]) -> list[str]:
    """Give the words of a recipe for stages of one rank each."""
    left = [word for word in without(words, LAYOUT) if word != "--layerwise-disaggregated-training"]
    return [*left, "--vtp-size-list", "1,1,1"]


def trained(scripts: Scripts, by_rank: Sequence[Sequence[str]], extra: Sequence[str] = ()) -> list[ScriptRun]:
    """Train with these words on every rank."""
    return scripts.finish(len(by_rank), {"arguments": list(extra), "by_rank": dict(enumerate(by_rank))})


@pytest.mark.parametrize("recipe", IN_SMALL.values(), ids=[*IN_SMALL])
def test_in_small_it_trains_as_uniform_stages_do(recipe: Recipe, scripts: Scripts, tmp_path: Path) -> None:
    nodes = [started(recipe, node, tmp_path, SMALL="1") for node in range(len({*recipe.scripts}))]
    by_rank = [node.words for node in nodes for _ in range(node.num_processes)]
    equal = [uniform(by_rank[0])] * 3
    begin: list[str] = []
    if {"--num-experts", "--layerwise-disaggregated-training"} & {*by_rank[0]}:
        # Experts, and layers of other stages, begin with other weights.
        folder = str(tmp_path / "start")
        whole = ["--vtp-lora-save-base"] if "--vtp-lora-rank" in by_rank[0] else []
        trained(scripts, equal, [*whole, "--save", folder, "--save-interval", "1", "--exit-interval", "1"])
        begin = ["--load", str(tmp_path / "empty"), "--pretrained-checkpoint", folder]
    reference = trained(scripts, equal, begin)
    assert len(losses(reference)) == NUM_STEPS and losses(reference)[0] == pytest.approx(6.2, abs=0.5)
    assert_same_training(trained(scripts, by_rank, begin), reference)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(recipe, id=name, marks=LATER if name != DEFAULT else []) for name, recipe in IN_SMALL.items()],
)
def test_the_scripts_train_as_users_start_them(recipe: Recipe, tmp_path: Path) -> None:
    sites = {script.removesuffix(".sh"): [RECIPES / recipe.folder / script] for script in recipe.scripts}
    known = environment(SMALL=1, MASTER_PORT=free_port(), LAYOUT=recipe.layout)
    printed = start_sites(tmp_path, sites, dict.fromkeys(sites, known))
    text = "".join(printed.values())
    assert re.findall(r"iteration +(\d+)/ +3 .* lm loss: ", text) == ["1", "2", "3"], text[-3000:]
