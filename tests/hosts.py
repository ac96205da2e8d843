"""What the tests leave out on each host and Python, with the reason; delete a line to switch its tests on.

A key is the beginning of a test's name as pytest prints it. ``tests/conftest.py`` skips these tests; ``make test`` runs
all others, on every host.
"""

from __future__ import annotations

from collections.abc import Iterator

from vtp_plugin.hosts import family_of, find_megatron

PATCHES = "its patches do not stand yet"
TRAINING = "its wheel has no megatron.training"
ORDER = "Megatron makes its groups in another order than 0.19, which this test compares"

_PATCHED = {
    "tests/hang/": PATCHES,
    "tests/multiproc/": PATCHES,
    "tests/device/": PATCHES,
}
LEFT_OUT: dict[str, dict[str, str]] = {
    "0.12": {**_PATCHED},
    "0.16": {**_PATCHED},
    "0.19": {},
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
