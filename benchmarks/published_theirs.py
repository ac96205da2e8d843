"""Sailor's own simulator as a judge of plans, imported from a reader's checkout.

It takes all stages to run microbatches of one size. Where stages have different numbers of replicas that cannot be: one
with half as many replicas runs twice as large microbatches. So for such a plan their simulator, which stays as it is,
is given the times and sizes of each layer at the size that its stage has. A plan whose replicas do not share the
samples evenly is judged as they do it: with a last microbatch that some replicas lack.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import io
import sys
import tempfile
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.published_cluster import Artifact
from benchmarks.published_plans import Plan, Stage

# Imported by their simulator, and not needed for what is asked of it.
_UNUSED = ("pandas", "torch")


class Theirs:
    """Their simulator.

    Args:
        artifact: what was read of the checkout.
        folder: folder in which the simulator looks for a folder ``sailor``: a link to the checkout.
    """

    def __init__(self, artifact: Artifact, folder: Path) -> None:
        self._module = importlib.import_module("sailor.Planner.simulations.runtime_simulator")
        self._artifact, self._folder = artifact, folder

    @classmethod
    @contextlib.contextmanager
    def of(cls, root: Path, artifact: Artifact) -> Iterator[Theirs]:
        """Import it; afterwards nothing of it is left."""
        path = str(root.resolve())
        missing = [name for name in _UNUSED if importlib.util.find_spec(name) is None]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "sailor").symlink_to(path)
            sys.modules.update((name, ModuleType(name)) for name in missing)
            sys.path.insert(0, path)
            try:
                yield cls(artifact, Path(folder))
            finally:
                sys.path.remove(path)
                for name in [name for name in sys.modules if name.partition(".")[0] in ("sailor", *missing)]:
                    del sys.modules[name]

    def samples_per_s(self, plan: Plan) -> float | None:
        """Judge a plan; None if it has not enough memory by their rule."""
        layers, profiles = self._artifact.layers, self._artifact.profiles
        if not plan.has_equal_replicas:
            layers, profiles = _by_stage(self._artifact, plan)
        training = self._artifact.training
        model = training["model"]
        # They print a lot.
        with contextlib.redirect_stdout(io.StringIO()):
            zone = self._artifact.zone
            simulator = self._module.Simulator(
                str(self._folder), training, {model: layers}, False, {model: profiles}, zone
            )
            words = _in_their_words(plan, zone)
            if not simulator.check_config_fits(words):
                return None
            step_s = simulator.simulate_iteration_time(words)[0]
        return float(training["global_batch_size"] / step_s)


def _in_their_words(plan: Plan, zone: str) -> dict[str, Any]:
    return {"mbs": plan.micro, "pipeline_list": [_pipeline(stages, zone) for stages in plan.pipelines]}


def _pipeline(stages: tuple[Stage, ...], zone: str) -> dict[str, Any]:
    ends = pairwise(accumulate((stage.layers for stage in stages), initial=0))
    return {
        "num_stages": len(stages),
        "layers_per_stage": [[*range(start, end)] for start, end in ends],
        "tmp_per_stage": [[([(each.kind, each.tp, zone)], each.tp) for each in stage.replicas] for stage in stages],
        "dp": [len(stage.replicas) for stage in stages],
    }


def _by_stage(artifact: Artifact, plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """Give every layer what it takes and holds with its stage's microbatches, under the plan's own size."""
    layers, profiles = copy.deepcopy(artifact.layers), copy.deepcopy(artifact.profiles)
    start = 0
    sizes = plan.micros
    for number, (stage, size) in enumerate(zip(plan.pipelines[0], sizes, strict=True)):
        for layer in map(str, range(start, start + stage.layers)):
            for each in set(stage.replicas):
                of_card = profiles[each.kind]
                of_card[str(plan.micro)][str(each.tp)][layer] = artifact.profiles[each.kind][str(size)][str(each.tp)][
                    layer
                ]
            for of_size in layers.values():
                of_size[layer]["act_mem_floats"] *= size / plan.micro
        # A boundary carries what the larger microbatches of its two stages are.
        largest = max(sizes[number : number + 2])
        layers["1"][str(start + stage.layers - 1)]["act_output_floats"] *= largest / plan.micro
        start += stage.layers
    return layers, profiles
