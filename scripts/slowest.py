"""Print where the time of the last run of the tests went: scripts/slowest.py FILE [NUMBER]."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Entry = Mapping[str, float]


def table(times: Mapping[str, Entry], title: str, key: Callable[[str], str], number: int) -> list[str]:
    """Return the lines of a table: what took longest, by the clock of its worker and on processors.

    >>> times = {"tests/a/b.py::c": {"clock_s": 2.0, "processor_s": 3.0}}
    >>> print(*table(times, "folder", lambda name: name[:7], 1), sep="\\n")
      seconds  processors  tests  folder
          2.0         3.0      1  tests/a
    """
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
    for name, entry in times.items():
        row = found[key(name)]
        row[0], row[1], row[2] = row[0] + entry["clock_s"], row[1] + entry["processor_s"], row[2] + 1
    rows = sorted(found.items(), key=lambda item: -item[1][0])[:number]
    return [
        f"  seconds  processors  tests  {title}",
        *(f"{clock_s:9.1f}  {used_s:10.1f}  {tests:5.0f}  {name}" for name, (clock_s, used_s, tests) in rows),
    ]


def jobs(lines: Sequence[str], number: int) -> list[str]:
    """Return the lines of a table: which jobs of pools were asked for again, and what that took.

    Folders that a job was given are left out of what it is, since each test has its own.

    >>> line = json.dumps({"job": "train 2 /tmp/a", "clock_s": 1.5})
    >>> print(*jobs([line, line, line.replace("/a", "/b")], 1), sep="\\n")
    3 jobs of pools took 4.5 seconds of workers, 2 of them 3.0 seconds for the same again
      seconds  times  job
          3.0      3  train 2 PATH
    """
    took: defaultdict[str, list[float]] = defaultdict(list)
    for line in lines:
        entry = json.loads(line)
        took[re.sub(r"/tmp/[^\s'\"]*", "PATH", entry["job"])].append(entry["clock_s"])
    again = {job: sum(sorted(times)[:-1]) for job, times in took.items()}
    rows = sorted(again, key=lambda job: -again[job])[:number]
    total_s, num_again = sum(map(sum, took.values())), len(lines) - len(took)
    return [
        f"{len(lines)} jobs of pools took {total_s:.1f} seconds of workers, {num_again} of them "
        f"{sum(again.values()):.1f} seconds for the same again",
        "  seconds  times  job",
        *(f"{again[job]:9.1f}  {len(took[job]):5}  {job[:200]}" for job in rows if again[job]),
    ]


def main() -> int:
    """Print tables by folder, file and test."""
    path = Path(sys.argv[1])
    if not path.is_file():
        print(f"{path} is missing: no run has been measured; start `make test`", file=sys.stderr)
        return 2
    number = int(sys.argv[2]) if len(sys.argv) > 2 else 30
    times: Mapping[str, Entry] = json.loads(path.read_text())
    clock_s = sum(entry["clock_s"] for entry in times.values())
    print(f"{len(times)} tests, {clock_s:.0f} seconds of workers")
    for title, key in (
        ("folder", lambda name: "/".join(name.split("::")[0].split("/")[:3])),
        ("file", lambda name: name.split("::")[0]),
        ("test", lambda name: name),
    ):
        print(*table(times, title, key, number), sep="\n")
    if (beside := Path(f"{path}.jobs")).is_file():
        print(*jobs(beside.read_text().splitlines(), number), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
