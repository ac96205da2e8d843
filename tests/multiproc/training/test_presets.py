"""Small versions of today's public models, on every layout, from a checkpoint of the uniform run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.multiproc.cases.presets import (
    LAYOUTS,
    PRESETS,
    STOCK_ERROR,
    UNIFORM,
    Layout,
    check_refused,
    command,
    go_on,
    largest_difference,
    start,
)
from tests.multiproc.cases.script_cases import TOLERANCE, ScriptRun, Scripts, arguments, losses
from tests.support.hosts import ROOT, resume_tolerance

DEFAULTS = {("qwen-3-moe", "1,2,2 U")}
Start = Callable[[str], tuple[Path, list[ScriptRun]]]


def _cases() -> Iterator[object]:
    for name in PRESETS:
        for layout in LAYOUTS:
            marks = [] if (name, layout) in DEFAULTS else [pytest.mark.full]
            yield pytest.param(name, layout, id=f"{name}-{layout}", marks=marks)


@pytest.fixture(scope="module")
def started(scripts: Scripts, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Uniform runs and their checkpoints; each is made once."""
    known: dict[str, tuple[Path, list[ScriptRun]]] = {}

    def find(name: str) -> tuple[Path, list[ScriptRun]]:
        if name not in known:
            folder = tmp_path_factory.mktemp("preset")
            runs = start(scripts, PRESETS[name], folder)
            if resume_tolerance() > TOLERANCE:
                # Megatron 0.12 itself is off: the uniform run goes on from its checkpoint, too.
                runs = go_on(scripts, PRESETS[name], UNIFORM, folder)
            known[name] = folder, runs
        return known[name]

    return find


@pytest.mark.needs("scripts_here")
@pytest.mark.needs("experts")
@pytest.mark.needs("presets_that_resume")
@pytest.mark.needs("latent_attention", cases=("deepseek",))
@pytest.mark.parametrize(("name", "layout"), list(_cases()))
def test_preset(scripts: Scripts, started: Start, name: str, layout: str) -> None:
    """Losses and gradient norms of five steps are those of the uniform run; where it does not fit, it is refused."""
    preset, place = PRESETS[name], LAYOUTS[layout]
    if layout in preset.not_run:
        check_refused(scripts, preset, place, preset.not_run[layout])
        return
    folder, reference = started(name)
    assert losses(reference)[-1] < losses(reference)[0]
    assert largest_difference(go_on(scripts, preset, place, folder), reference) <= TOLERANCE


@pytest.mark.needs("latent_attention")
@pytest.mark.full
def test_latent_attention_needs_an_attention_of_the_tests(scripts: Scripts) -> None:
    """Without the plugin, on one rank, Megatron's local layers do not take it."""
    words = arguments("1", extra=command(PRESETS["deepseek-v2"], Layout(sizes="1")))
    at = words.index("--vtp-device")
    del words[at : at + 4]
    (run,) = scripts.launch(1, {"arguments": words, "how": "stock"})
    assert run.exit_code == 1 and STOCK_ERROR in run.output


def test_the_page_has_all_presets_and_layouts() -> None:
    """Which results stand there says the script that writes the page."""
    text = (ROOT / "docs/guides/presets.md").read_text()
    for name, preset in PRESETS.items():
        assert f"| `{name}` |" in text and preset.model in text
        assert " ".join(preset.flags.split()) in " ".join(text.split()), name
    assert f"| {' | '.join(LAYOUTS)} |" in text
