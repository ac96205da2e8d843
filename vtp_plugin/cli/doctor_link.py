"""``doctor --link``: what listens in this network namespace, and who can reach it."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from vtp_plugin.cli.parser import print_json
from vtp_plugin.cli.terminal import TextTable, show
from vtp_plugin.errors import ConfigError
from vtp_plugin.link.reach import find_interfaces, find_listeners, is_of_a_run, reach_of
from vtp_plugin.link.site_file import read_site

_HEADER = ("listens on", "process", "who can reach it")


def report_listeners(file: str, *, is_json: bool) -> None:
    """Print all listeners, and leave with 1 if somebody outside can reach one of a run.

    Args:
        file: a site's file, whose firewall counts; empty for none.
        is_json: whether as one JSON object.

    Raises:
        ConfigError: the system does not tell.
    """
    site = read_site(Path(file)) if file else None
    interfaces, (listeners, problem) = find_interfaces(), find_listeners()
    if interfaces is None or problem:
        raise ConfigError(f"listeners cannot be told: {problem or 'ip shows no interface'}; install iproute2")
    rows: list[dict[str, object]] = []
    problems: list[str] = []
    for listener in listeners:
        reach, is_outside = reach_of(listener, interfaces, site)
        of_run = is_of_a_run(listener)
        rows.append({**asdict(listener), "of_a_run": of_run, "reach": reach, "outside": is_outside})
        if of_run and is_outside:
            problems.append(
                f"port {listener.port} of process {listener.pid} is open to {reach}; a run over several sites listens "
                "on its link alone; start it with `vtp link run` (docs/guides/link.md)"
            )
    if is_json:
        names = {each.name: {"kind": each.kind, "addresses": each.addresses} for each in interfaces}
        print_json(
            "doctor", {"interfaces": names, "listeners": rows, "problems": problems, "exit_code": bool(problems)}
        )
    else:
        cells = [
            (f"{row['address']} port {row['port']}", f"{row['process'] or '(of another user)'}", f"{row['reach']}")
            for row in rows
        ]
        show([f"interfaces: {', '.join(map(str, interfaces))}"])
        show([TextTable.aligned(_HEADER, cells)] if cells else ["nothing listens here"])
        show(f"problem: {line}" for line in problems)
        show(
            [f"verdict: {len(problems)} listeners of runs can be reached from outside" if problems else "verdict: fine"]
        )
    sys.exit(1 if problems else 0)
