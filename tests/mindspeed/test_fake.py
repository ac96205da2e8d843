"""The plugin over a patch manager that behaves as MindSpeed's: order, composition, repatching, flags of both."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.hosts import PYTHON_PATH, example_script
from tests.mindspeed.launcher import launch
from tests.multiproc.script_cases import arguments, num_ranks

pytest.importorskip("megatron.training", reason="whole scripts need megatron.training")

SCRIPT = Path(__file__).with_name("script_with_fake.py")
PATH = os.pathsep.join([PYTHON_PATH, str(SCRIPT.parent / "fake")])
TIMEOUT_S = 300.0
_NUMBERS = {name: re.compile(rf"{name}: ([\d.E+-]+)") for name in ("lm loss", "grad norm")}


def start(script: Path | str, sizes: str, *extra: str, form: str = "run", world_size: int = 0) -> tuple[int, str]:
    """Start a script under torchrun and return how it ended and what it wrote."""
    ranks = world_size or num_ranks(sizes)
    words = arguments(sizes, extra=[*extra, "--log-interval", "1"])
    if form == "repatch":
        # The list is given to apply(), and the platform with it.
        at = words.index("--vtp-size-list")
        del words[at : at + 2]
    # Older Megatrons ask for the variable.
    environment = {"PYTHONPATH": PATH, "FAKE_FORM": form, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return launch(script, words, num_ranks=ranks, is_run=form == "run", environment=environment, timeout_s=TIMEOUT_S)


def numbers(output: str) -> dict[str, list[float]]:
    """Return losses and gradient norms, step by step."""
    return {name: [float(text) for text in pattern.findall(output)] for name, pattern in _NUMBERS.items()}


def assert_same(output: str, reference: dict[str, list[float]]) -> None:
    """Compare losses to 1e-5, and gradient norms as far as Megatron prints them: three decimals."""
    found = numbers(output)
    assert found["lm loss"] == pytest.approx(reference["lm loss"], rel=1e-5)
    assert found["grad norm"] == pytest.approx(reference["grad norm"], abs=2e-3)


def assert_one_line(code: int, output: str) -> None:
    """Check that the ranks ended with their line: the only stack trace is the launcher's."""
    assert code != 0
    assert output.count("Traceback (most recent call last)") == 1, output[-6000:]
    assert "ChildFailedError" in output


@pytest.fixture(scope="module")
def reference() -> dict[str, list[float]]:
    """The uniform run, without the fake."""
    code, output = start(example_script(), "1,1")
    assert code == 0, output[-4000:]
    found = numbers(output)
    assert [len(values) for values in found.values()] == [4, 4]
    return found


@pytest.mark.parametrize("form", ["run", "repatch", pytest.param("two lines", marks=pytest.mark.full)])
def test_trains_as_the_uniform_run(reference: dict[str, list[float]], form: str) -> None:
    code, output = start(SCRIPT, "1,2", form=form)
    assert code == 0, output[-6000:]
    assert_same(output, reference)
    # Our replacements lie around the fake's, and both run.
    reports = set(re.findall(r"calls (\[.*?\]) lost (\[.*?\])", output))
    assert reports == {("['initialize_model_parallel', 'validate_args']", "[]")}


@pytest.mark.full
def test_u_shape_takes_the_flags_of_both() -> None:
    """MindSpeed-LLM would act on them while its adaptor is imported: under `run` it does not see them."""
    extra = ["--layerwise-disaggregated-training", "--num-layer-list", "1,2,1"]
    code, output = start(SCRIPT, "1,2", *extra)
    assert code == 0, output[-6000:]
    _, without_fake = start(example_script(), "1,2", *extra)
    assert_same(output, numbers(without_fake))


def test_own_u_shape_in_place_is_refused() -> None:
    code, output = start(
        SCRIPT, "1,2", "--layerwise-disaggregated-training", "--num-layer-list", "1,2,1", form="two lines"
    )
    assert_one_line(code, output)
    assert output.count("MindSpeed-LLM's own --layerwise-disaggregated-training is in place") >= 3


def test_adaptor_after_apply_ends_the_run(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text("import vtp_plugin\nvtp_plugin.apply()\nimport mindspeed.megatron_adaptor\n")
    code, output = start(script, "1,1", form="two lines", world_size=1)
    assert_one_line(code, output)
    assert "MindSpeed's adaptor is imported after vtp_plugin.apply()" in output
    assert "import mindspeed.megatron_adaptor" in output
