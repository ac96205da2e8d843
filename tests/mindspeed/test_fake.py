"""The plugin over a patch manager that behaves as MindSpeed's: order, composition, repatching, flags of both."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.mindspeed.launcher import launch
from tests.mindspeed.split import PLANNED, SPLIT, costs, num_split
from tests.multiproc.cases import script_cases
from tests.multiproc.cases.script_cases import arguments, num_ranks
from tests.support.hosts import PYTHON_PATH, ROOT
from tests.support.pool import Pool, start_python

pytestmark = pytest.mark.needs("scripts_here")

SCRIPT = Path(__file__).with_name("script_with_fake.py")
PATH = os.pathsep.join([PYTHON_PATH, str(SCRIPT.parent / "fake")])
TIMEOUT_S = 300.0
PLANNED_AND_SPLIT = (*PLANNED, SPLIT, *costs(1, 1))
_NUMBERS = {name: re.compile(rf"{name}: ([\d.E+-]+)") for name in ("lm loss", "grad norm")}


def words_of(sizes: str, *extra: str, form: str = "run") -> list[str]:
    """Give the command line of a form."""
    words = arguments(sizes, extra=[*extra, "--log-interval", "1"])
    if form == "repatch":
        # The list is given to apply(), and the platform with it.
        at = words.index("--vtp-size-list")
        del words[at : at + 2]
    return words


def start(
    pool: Pool, script: Path | str, sizes: str, *extra: str, form: str = "run", world_size: int = 0
) -> tuple[int, str]:
    """Start a script in forks that import Megatron and the plugin anew; return how it ended and what it wrote."""
    job = {
        "script": str(script),
        "arguments": words_of(sizes, *extra, form=form),
        "how": "run" if form == "run" else "plain",
        "hooks": ["forget_megatron"],
        "timeout_s": TIMEOUT_S,
    }
    variables = {"PYTHONPATH": PATH, "FAKE_FORM": form}
    runs = pool.run(world_size or num_ranks(sizes), script_cases.JOB, job, timeout_s=TIMEOUT_S + 30.0, env=variables)
    code = next((run.exit_code for run in runs if run.exit_code != 0), 0)
    return -1 if code is None else code, "".join(run.output for run in runs)


def numbers(output: str) -> dict[str, list[float]]:
    """Return losses and gradient norms, step by step."""
    return {name: [float(text) for text in pattern.findall(output)] for name, pattern in _NUMBERS.items()}


def assert_same(output: str, reference: dict[str, list[float]]) -> None:
    """Compare losses to 1e-5, and gradient norms as far as Megatron prints them: three decimals."""
    found = numbers(output)
    assert found["lm loss"] == pytest.approx(reference["lm loss"], rel=1e-5)
    assert found["grad norm"] == pytest.approx(reference["grad norm"], abs=2e-3)


def assert_one_line(code: int, output: str, *, of_launcher: int = 0) -> None:
    """Check that the ranks ended with their line: the only stack traces are the launcher's."""
    assert code != 0
    assert output.count("Traceback (most recent call last)") == of_launcher, output[-6000:]
    assert ("ChildFailedError" in output) is bool(of_launcher)


@pytest.fixture(scope="module")
def reference(script_pool: Pool) -> dict[str, list[float]]:
    """The uniform run, without the fake."""
    found = numbers(script_cases.train(script_pool, "1,1")[-1].output)
    assert [len(values) for values in found.values()] == [4, 4]
    return found


@pytest.mark.parametrize("form", ["run", "repatch", pytest.param("two lines", marks=pytest.mark.full)])
def test_trains_as_the_uniform_run(script_pool: Pool, reference: dict[str, list[float]], form: str) -> None:
    assert_right(*start(script_pool, SCRIPT, "1,2", form=form), reference)


@pytest.mark.parametrize("form", ["run", "repatch"])
def test_trains_with_split_backwards(
    script_pool: Pool, reference: dict[str, list[float]], tmp_path: Path, form: str
) -> None:
    extra = (*PLANNED_AND_SPLIT, "--vtp-trace", str(tmp_path))
    assert_right(*start(script_pool, SCRIPT, "1,2", *extra, form=form), reference)
    assert num_split(tmp_path) > 0


def test_its_own_linear_layers_are_not_split(script_pool: Pool) -> None:
    code, output = start(script_pool, SCRIPT, "1,2", *PLANNED_AND_SPLIT, "--own-linear-layers")
    assert_one_line(code, output)
    assert output.count("--vtp-split-backward with mindspeed.features_manager.own_features of MindSpeed in") >= 3


@pytest.mark.full
def test_started_by_torchrun(reference: dict[str, list[float]]) -> None:
    # Older Megatrons ask for the last variable.
    environment = {"PYTHONPATH": PATH, "FAKE_FORM": "run", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    words = words_of("1,2")
    started = launch(SCRIPT, words, num_ranks=3, is_run=True, environment=environment, timeout_s=TIMEOUT_S)
    assert_right(*started, reference)


def assert_right(code: int, output: str, reference: dict[str, list[float]]) -> None:
    """Check what a run says that should train as the uniform one."""
    assert code == 0, output[-6000:]
    assert_same(output, reference)
    # Our replacements lie around the fake's, and both run.
    reports = set(re.findall(r"calls (\[.*?\]) lost (\[.*?\])", output))
    assert reports == {("['initialize_model_parallel', 'validate_args']", "[]")}


def test_profile_times_what_the_adaptor_has_patched(tmp_path: Path) -> None:
    code = """
import sys
from vtp_plugin.cli.main import main
main(sys.argv[1:])
from mindspeed.calls import NAMES
from vtp_plugin.host.mindspeed import loaded_adaptor
print(loaded_adaptor(), "validate_args" in NAMES)
"""
    model = script_cases.MODEL[: script_cases.MODEL.index("--lr")]
    words = [*model, "--vocab-size", "128", "--transformer-impl", "local", "--vtp-device", "cpu", "--tp-sizes", "1"]
    words += ["--no-persist-layer-norm", "--no-gradient-accumulation-fusion", "--use-cpu-initialization"]
    out = start_python("-c", code, "profile", *words, "--rounds", "1", "--out", str(tmp_path / "a.toml"), path=PATH)
    assert out.splitlines()[-1] == "mindspeed.megatron_adaptor True"
    assert "weights_ms = " in (tmp_path / "a.toml").read_text()


@pytest.mark.full
def test_u_shape_takes_the_flags_of_both(script_pool: Pool) -> None:
    """MindSpeed-LLM would act on them while its adaptor is imported: under `run` it does not see them."""
    extra = ["--layerwise-disaggregated-training", "--num-layer-list", "1,2,1"]
    code, output = start(script_pool, SCRIPT, "1,2", *extra)
    assert code == 0, output[-6000:]
    without_fake = script_cases.train(script_pool, "1,2", extra)
    assert_same(output, numbers("".join(run.output for run in without_fake)))


def test_own_u_shape_in_place_is_refused(script_pool: Pool) -> None:
    extra = ["--layerwise-disaggregated-training", "--num-layer-list", "1,2,1"]
    code, output = start(script_pool, SCRIPT, "1,2", *extra, form="two lines")
    assert_one_line(code, output)
    assert output.count("MindSpeed-LLM's own --layerwise-disaggregated-training is in place") >= 3


def test_adaptor_after_apply_ends_the_run(script_pool: Pool, tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text("import vtp_plugin\nvtp_plugin.apply()\nimport mindspeed.megatron_adaptor\n")
    code, output = start(script_pool, script, "1,1", form="two lines", world_size=1)
    assert_one_line(code, output)
    assert "MindSpeed's adaptor is imported after vtp_plugin.apply()" in output
    assert "import mindspeed.megatron_adaptor" in output


@pytest.mark.parametrize("form", ["run", "two lines"])
def test_an_adaptor_of_which_nothing_is_known_is_named(script_pool: Pool, tmp_path: Path, form: str) -> None:
    """MegatronAdaptor, below MindSpeed's branches for Megatron 0.17 and 0.18: imported before ``apply()``, or after."""
    (tmp_path / "megatron_adaptor.py").write_text("import megatron.core\n")
    script = tmp_path / "script.py"
    ours = "" if form == "run" else "import vtp_plugin; vtp_plugin.apply()\n"
    example = repr(str(ROOT / "examples" / "pretrain_gpt.py"))
    script.write_text(
        f"import sys, runpy\nsys.path.insert(0, {str(tmp_path)!r})\n{ours}import megatron_adaptor\n"
        f"runpy.run_path({example}, run_name='__main__')\n"
    )
    code, output = start(script_pool, script, "1,2", form=form)
    assert_one_line(code, output)
    assert output.count("megatron_adaptor patches Megatron") >= 3, output[-6000:]
