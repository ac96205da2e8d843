"""Toys: small changes, kept as patches, that show: the recipes of docs/development/extending.md name all files.

A toy is applied to a copy of the repository. It touches the files that its recipe names, and does something there: it
trains, or tests that try everything of its kind try it, too.

    python -m tests.toys.renew unpack NAME    # makes a copy, out/toys/NAME; what does not fit is in *.rej there
    python -m tests.toys.renew pack NAME      # writes tests/toys/NAME.patch from it

So a patch that does not fit any more is renewed: unpack it, follow the recipe where it did not fit, pack it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.multiproc.cases.core_cases import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """A change that is no part of the project.

    Attributes:
        name: of its patch.
        recipe: heading of its recipe.
        does: what it adds.
        case: what is trained with it; the uniform run is that of two stages of one rank. None: it trains nothing.
        job: trains it: a function of the copy.
        options: of ``apply()``, beside the case's.
        says: a line of the start-up summary.
        tries: cases that tests of the house have in the copy alone.
        grids: cases of whole grids, likewise.
        tests: of the house, which hold in the copy; those that the patch adds run, too.
    """

    name: str
    recipe: str
    does: str
    case: Case | None = None
    job: str = "tests.toys.jobs:train"
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    says: str = ""
    tries: tuple[str, ...] = ()
    grids: tuple[str, ...] = ()
    tests: tuple[str, ...]


HOUSE = (
    *("tests/house/test_docs.py", "tests/house/test_docs_text.py", "tests/house/test_house.py"),
    *("tests/house/test_imports.py", "tests/house/test_nothing_unused.py", "tests/house/test_words.py"),
    "tests/house/test_writes.py",
)
_SMALL = {"sizes": (1, 2), "num_steps": 1, "num_microbatches": 2}
TOYS = (
    Toy(
        name="version",
        recipe="A version of Megatron",
        does="Megatron 0.20, for which the installed one is taken",
        case=Case.of(**_SMALL),
        job="tests.toys.jobs:train_with_0_20",
        says="not yet run with Megatron 0.20: --sft, hangs, and the whole grids of options",
        tests=("tests/unit/host/test_pins.py", "tests/house/test_make_env.py"),
    ),
    Toy(
        name="option",
        recipe="An option",
        does="--vtp-leaders-only: between all stages only leaders talk",
        case=Case.of(**_SMALL),
        options={"leaders_only": True},
        says="boundary 0->1: rank0 (asked for)",
        tests=("tests/unit/config/test_config.py", "tests/unit/session/test_statement.py"),
    ),
    Toy(
        name="transport",
        recipe="A transport",
        does="--vtp-transport direct: each rank gets its parts from those that answer for them, with no collective",
        case=Case.of(**_SMALL, transport="direct"),
        says="boundary 0->1: direct (asked for)",
        tests=(
            "tests/unit/plan/test_boundary.py",
            "tests/unit/config/test_config.py",
            "tests/property/test_boundary_properties.py",
        ),
    ),
    Toy(
        name="model_feature",
        recipe="A model feature",
        does="a weight of which every stage has a copy (has_cond_embedder)",
        case=Case.of(**_SMALL, is_drawn=True, wants_weights=True),
        job="tests.multiproc.training.test_conditions:train",
        says="boundary 0->1: ",
        tests=("tests/unit/host/test_options.py",),
    ),
    Toy(
        name="companion",
        recipe="Something more that crosses",
        does="later stages learn how many kinds of tokens a microbatch has, with --log-throughput",
        tries=("tests/multiproc/boundaries/test_token_kinds.py::test_counts_cross",),
        tests=("tests/unit/runtime/test_audit.py",),
    ),
    Toy(
        name="family",
        recipe="A Hugging Face family",
        does="Seed-OSS, whose layers are those of Qwen 2 with heads of any size",
        tries=(
            "tests/unit/checkpoint/test_hf.py::test_tensors_come_back_byte_by_byte[seed-oss]",
            "tests/unit/checkpoint/test_hf.py::test_published_configs[Seed-OSS (sizes made up)]",
        ),
        grids=("tests/multiproc/checkpoint/test_hf.py::test_a_run_computes_what_transformers_computes[seed-oss-1,2]",),
        tests=("tests/unit/checkpoint/test_hf.py", "tests/unit/checkpoint/test_hf_fields.py"),
    ),
)
BY_NAME = {toy.name: toy for toy in TOYS}
