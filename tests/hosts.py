"""What the tests leave out on each host and Python, with the reason; delete a line to switch its tests on.

A key is the beginning of a test's name as pytest prints it. ``tests/conftest.py`` skips these tests; ``make test`` runs
all others, on every host.
"""

from __future__ import annotations

from collections.abc import Iterator

from vtp_plugin.hosts import family_of, find_megatron

SCRIPTS = "whole scripts need megatron.training, which its wheel lacks, or an interface of Megatron 0.19"
UNTRIED = "not tried with it yet"
GROUPS = "this test compares with the groups of Megatron 0.19"
DOCS = "the documents show Megatron 0.19"

_SCRIPTS = (
    "bad_input",
    "checkpoint",
    "core_only",
    "edge_cloud_example",
    "executor",
    "functional",
    "late_apply",
    "leaks",
    "log",
    "measured_order",
    "options",
    "ordering",
    "packed",
    "probe",
    "training",
    "training_bad_input",
    "training_context",
    "u_training",
    "u_traps",
    "unequal_dp_training",
)
_OLDER = {
    "tests/device/": UNTRIED,
    "tests/hang/": UNTRIED,
    "tests/multiproc/test_context_parallel.py": UNTRIED,
    "tests/multiproc/test_group_parity.py": UNTRIED,
    "tests/multiproc/test_model_group.py": "its recorder reads operations of a newer torch",
    "tests/multiproc/test_optimizer.py": "counts of zero gradients differ by a few: not explained yet",
    "tests/multiproc/test_parity.py": "as test_optimizer.py; test_host_grid.py runs instead",
    "tests/multiproc/test_sequential.py": "interleaved stages do not load its checkpoint: not explained yet",
    "tests/multiproc/test_tied_embeddings.py": "interleaving with the distributed optimizer fails: not explained yet",
    "tests/multiproc/test_u_shape.py::test_both_chunks": "batches are shared by a function of megatron.training",
    "tests/multiproc/test_u_shape.py::test_recorded": "its recorder reads operations of a newer torch",
    "tests/multiproc/test_unequal_dp.py": UNTRIED,
    "tests/multiproc/test_uniform_bitwise.py": UNTRIED,
    **dict.fromkeys((f"tests/multiproc/test_{name}.py" for name in _SCRIPTS), SCRIPTS),
    "tests/unit/test_apply.py": UNTRIED,
    "tests/unit/test_checkpoint_validation.py": UNTRIED,
    "tests/unit/test_checks_without_asserts.py::test_checks_refuse": UNTRIED,
    "tests/unit/test_cli.py::test_doctor_is_content": UNTRIED,
    "tests/unit/test_cli.py::test_doctor_leaves_nothing": UNTRIED,
    "tests/unit/test_cli.py::test_doctor_tries": UNTRIED,
    "tests/unit/test_cli.py::test_run_": UNTRIED,
    "tests/unit/test_docs.py::test_generated_docs": DOCS,
    "tests/unit/test_docs_commands.py::test_first_run": UNTRIED,
    "tests/unit/test_layout.py::test_explicit_expert_tp": GROUPS,
    "tests/unit/test_layout.py::test_unequal_creation_order": GROUPS,
    "tests/unit/test_layout.py::test_uniform_": GROUPS,
    "tests/unit/test_pins.py::test_a_changed_target": UNTRIED,
    "tests/unit/test_pins.py::test_the_installed": UNTRIED,
    "tests/unit/test_plan_counts.py": UNTRIED,
    "tests/unit/test_platform_cpu.py": UNTRIED,
}
LEFT_OUT: dict[str, dict[str, str]] = {
    "0.12": {
        **_OLDER,
        "tests/multiproc/test_u_shape.py::test_equals_the_sequential_model[1,1 dp=2": "a tied embedding with the "
        "distributed optimizer fails in Megatron itself, with the sizes of these tests",
    },
    "0.16": {**_OLDER},
    "0.19": {"tests/multiproc/test_host_grid.py": "test_parity.py tries more"},
}


def host_name() -> str:
    """Return the name of the host whose Megatron the tests import; empty where there is no known one."""
    megatron = find_megatron()
    host = None if megatron is None else family_of(megatron.version)
    return "" if host is None else host.name


def reason_to_skip(test: str, host: str) -> str:
    """Say why a host leaves a test out; empty if it runs.

    >>> reason_to_skip("tests/multiproc/test_parity.py::test_x", "0.12")
    'host 0.12: its patches do not stand yet'
    >>> reason_to_skip("tests/multiproc/test_parity.py::test_x", "0.19")
    ''
    """
    return next((f"host {host}: {reason}" for reason in _reasons(test, host)), "")


def _reasons(test: str, host: str) -> Iterator[str]:
    for beginning, reason in LEFT_OUT.get(host, {}).items():
        if test.startswith(beginning):
            yield reason
