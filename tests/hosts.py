"""What the tests leave out on each host and Python, with the reason; delete a line to switch its tests on.

A key is the beginning of a test's name as pytest prints it. ``tests/conftest.py`` skips these tests; ``make test`` runs
all others, on every host.
"""

from __future__ import annotations

from collections.abc import Iterator

from vtp_plugin.hosts import family_of, find_megatron

PATCHES = "its patches do not stand yet"
GROUPS = "this test compares with the groups of Megatron 0.19"
DOCS = "the documents show Megatron 0.19"

_WITHOUT_PATCHES = {
    "tests/device/": PATCHES,
    "tests/hang/": PATCHES,
    "tests/multiproc/": PATCHES,
    "tests/unit/test_apply.py": PATCHES,
    "tests/unit/test_checkpoint_validation.py": PATCHES,
    "tests/unit/test_checks_without_asserts.py::test_checks_refuse": PATCHES,
    "tests/unit/test_cli.py::test_doctor_is_content": PATCHES,
    "tests/unit/test_cli.py::test_doctor_leaves_nothing": PATCHES,
    "tests/unit/test_cli.py::test_doctor_tries": PATCHES,
    "tests/unit/test_cli.py::test_run_": PATCHES,
    "tests/unit/test_docs.py::test_generated_docs": DOCS,
    "tests/unit/test_docs_commands.py::test_first_run": PATCHES,
    "tests/unit/test_layout.py::test_explicit_expert_tp": GROUPS,
    "tests/unit/test_layout.py::test_unequal_creation_order": GROUPS,
    "tests/unit/test_layout.py::test_uniform_": GROUPS,
    "tests/unit/test_pins.py::test_a_changed_target": PATCHES,
    "tests/unit/test_pins.py::test_the_installed": PATCHES,
    "tests/unit/test_plan_counts.py": PATCHES,
    "tests/unit/test_platform_cpu.py": PATCHES,
}
LEFT_OUT: dict[str, dict[str, str]] = {"0.12": {**_WITHOUT_PATCHES}, "0.16": {**_WITHOUT_PATCHES}, "0.19": {}}


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
