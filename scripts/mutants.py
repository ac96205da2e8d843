"""Plant seeded mutants in the plugin and see whether the default tests notice: how tight is the net?

    python scripts/mutants.py measure               # once: which test enters which function, how long each takes
    python scripts/mutants.py plant --seed 1        # choose 60 mutants, on lines that a test runs
    python scripts/mutants.py run                   # run the tests that enter a mutant's function until one fails

A mutant changes one operator, one constant, one call or one pair of arguments. They are spread over the packages by
the square root of their code lines. ``out/mutants/planted.json`` has each with its line of code, so that the same
mutants run again after files have moved, and what became of them. A mutant that no test kills within its time needs a
test, or a reason. Of the first sixty, five led to tests (451ec93), and a sixth showed
that nothing tested the data type of autocast where its device is mapped (7f1e7a9).

A run needs Linux and Python 3.12, takes a copy of the repository, and leaves this one as it is.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
# Both are left out of the repository.
MUTANTS = ROOT / "out" / "mutants" / "planted.json"
MEASURED = ROOT / "out" / "mutants" / "measured.json"  # which tests enter which function
PARTS = ("vtp_plugin", "patches")
LEFT_OUT = ("svg.py", "draw", "show.py", "pictures", "/cli")  # what is looked at, not computed with
BUDGET_S = 120.0  # of a machine that is free; --pace makes it longer
HANG_S = 60.0
UNMEASURED_S = 20.0
SLOWEST_TEST_S = 45.0  # a test that takes longer is no way to find out within the budget
COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
            ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}  # fmt: skip
COMPUTED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "//", ast.Div: "*", ast.BitOr: "&"}
SYMMETRIC = ("min", "max", "math.gcd", "math.lcm", "isinstance")
# Two arguments side by side whose names hold one of these are of one kind, and could be swapped by mistake.
KIN = ("rank", "src", "dst", "stage", "upstream", "downstream", "tp", "dp", "cp", "ep", "forward", "backward", "first",
       "last", "prev", "next", "start", "stop", "worker", "channel", "there", "back")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: in ``function`` of ``file``, on the line of code ``line``, ``old`` becomes ``new``.

    Attributes:
        file: path in the repository.
        function: qualified name of the function that holds it.
        kind: operator, constant, call or swap.
        line: the line of code, without the blanks around it.
        column: where in that line ``old`` begins.
        old: what stands there; may go over several lines.
        new: what the mutant puts there.
    """

    file: str
    function: str
    kind: str
    line: str
    column: int
    old: str
    new: str

    def apply(self, root: Path) -> str | None:
        """Change the file under ``root``; return which file it was, or None where the line no longer stands."""
        for path in (root / self.file, *sorted(p for part in PARTS for p in (root / part).rglob("*.py"))):
            if path.is_file() and not path.is_symlink() and self._apply_to(path):
                return str(path.relative_to(root))
        return None

    def _apply_to(self, path: Path) -> bool:
        text = path.read_text()
        name = self.function.rpartition(".")[2]
        for _, node in functions(ast.parse(text)):
            if node.name != name:
                continue
            lines = text.splitlines(keepends=True)
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                code = lines[number - 1]
                start = sum(map(len, lines[: number - 1])) + len(code) - len(code.lstrip()) + self.column
                if code.strip() == self.line and text.startswith(self.old, start):
                    path.write_text(text[:start] + self.new + text[start + len(self.old) :])
                    return True
        return False


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield every function with its qualified name as code objects have it.

    >>> [name for name, _ in functions(ast.parse("class A:\\n def f(self):\\n  def g(): pass"))]
    ['A.f', 'A.f.<locals>.g']
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node
            yield from functions(node, f"{prefix}{node.name}.<locals>.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def mutants_of(file: str, text: str) -> Iterator[tuple[int, Mutant]]:
    """Yield every mutant of a source with the number of its line; messages, docstrings and types have none.

    >>> [(m.old, m.new) for _, m in mutants_of("a.py", "def f(a):\\n    return a + 1")]
    [('a + 1', 'a - 1'), ('1', '2')]
    """
    tree = ast.parse(text)
    lines = text.splitlines()
    for name, function in functions(tree):
        for node in _own_nodes(function.body):
            old = ast.get_source_segment(text, node)
            if old is None or lines[node.lineno - 1].isascii() is False:
                continue
            code = lines[node.lineno - 1]
            column = node.col_offset - (len(code) - len(code.lstrip()))
            for kind, new in _changes(node, text, old):
                yield node.lineno, Mutant(file, name, kind, code.strip(), column, old, new)


def _own_nodes(body: Sequence[ast.AST]) -> Iterator[Any]:
    for node in body:
        # A raise and what it says are told by tests of messages; a nested function is a function of its own.
        if isinstance(node, ast.Raise | ast.FunctionDef | ast.ClassDef | ast.JoinedStr | ast.Assert | ast.AnnAssign):
            continue
        yield node
        yield from _own_nodes(list(ast.iter_child_nodes(node)))


def _changes(node: ast.AST, text: str, old: str) -> Iterator[tuple[str, str]]:
    def part(node: ast.AST) -> str:
        return ast.get_source_segment(text, node) or ""

    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield "operator", f"{part(left)} {COMPARED[type(op)]} {part(right)}"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in COMPUTED and not _is_text(left, right):
            yield "operator", f"{part(left)} {COMPUTED[type(op)]} {part(right)}"
        case ast.BoolOp(op=op, values=[left, right]):
            yield "operator", f"{part(left)} {'or' if isinstance(op, ast.And) else 'and'} {part(right)}"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "operator", part(operand)
        case ast.Constant(value=bool(value)):
            yield "constant", str(not value)
        case ast.Constant(value=int(value)):
            yield "constant", str(value + 1)
        case ast.Expr(value=ast.Call()):
            if not old.startswith(("log.", "warnings.")):
                yield "call", "pass"
        case ast.Call(func=func, args=[*_, first, second]) if part(func) not in SYMMETRIC and _are_kin(first, second):
            head = (
                old[: old.rindex(part(first))] if old.count(part(first)) == 1 and old.count(part(second)) == 1 else ""
            )
            if head:
                swapped = old.replace(part(first), "\0").replace(part(second), part(first)).replace("\0", part(second))
                yield "swap", swapped
        case _:
            return


def _is_text(*nodes: ast.AST) -> bool:
    return any(
        isinstance(n, ast.JoinedStr) or (isinstance(n, ast.Constant) and isinstance(n.value, str)) for n in nodes
    )


def _are_kin(first: ast.AST, second: ast.AST) -> bool:
    """Tell whether two arguments are names of one kind, and not each other's part.

    >>> call = ast.parse("f(src_rank, dst_rank)").body[0].value
    >>> _are_kin(*call.args)
    True
    """
    texts = [ast.unparse(node) for node in (first, second)]
    if not all(isinstance(node, ast.Name | ast.Attribute) for node in (first, second)) or texts[0] in texts[1]:
        return False
    if texts[1] in texts[0]:
        return False
    return all(any(word in text.lower().split(".")[-1].split("_") for word in KIN) for text in texts)


def measure(arguments: argparse.Namespace) -> None:
    """Run default tests once, traced, and note which test enters which function, beside what was noted of others."""
    with tempfile.TemporaryDirectory(prefix="vtp-mutants-") as folder:
        copy, trace = _copy(Path(folder) / "copy"), Path(folder) / "trace"
        trace.mkdir()
        shutil.copy(ROOT / "scripts" / "mutants_trace.py", copy / "sitecustomize.py")
        report = Path(folder) / "report.xml"
        words = [*arguments.tests, "-m", "not full", "--numprocesses=2", "--dist=loadfile", f"--junitxml={report}",
                 "-o", "junit_family=xunit1"]  # fmt: skip
        _, output = _pytest(copy, words, timeout_s=7200.0, VTP_MUTANTS_TRACE=str(trace))
        print(output[-4000:])
        tests: defaultdict[str, set[str]] = defaultdict(set)
        lines: defaultdict[str, set[int]] = defaultdict(set)
        for file in trace.iterdir():
            for record in file.read_text().splitlines():
                match record.split("\t"):
                    case ["F", test, path, function] if test:
                        tests[f"{path}:{function}"].add(test)
                    case ["L", path, line]:
                        lines[path].add(int(line))
                    case _:
                        pass
        durations = _durations(report)
    if arguments.add:
        known = json.loads(MEASURED.read_text())
        durations = {**known["durations_s"], **durations}
        for found, before in ((tests, known["tests"]), (lines, known["lines"])):
            for key, values in before.items():
                found[key].update(values)
    MEASURED.parent.mkdir(parents=True, exist_ok=True)
    measured = {
        "durations_s": durations,
        "tests": {key: sorted(names) for key, names in sorted(tests.items())},
        "lines": {path: sorted(numbers) for path, numbers in sorted(lines.items())},
    }
    MEASURED.write_text(json.dumps(measured))
    print(f"{len(durations)} tests, {len(tests)} functions, {sum(map(len, lines.values()))} lines: {MEASURED}")


def plant(arguments: argparse.Namespace) -> None:
    """Choose mutants on lines that a test runs, and write them to ``out/mutants/planted.json``."""
    measured = json.loads(MEASURED.read_text())
    found: defaultdict[str, list[Mutant]] = defaultdict(list)
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            file = str(path.relative_to(ROOT))
            if path.is_symlink() or file.startswith("vtp_plugin/patches/") or any(word in file for word in LEFT_OUT):
                continue
            run = set(measured["lines"].get(file, ()))
            package = "/".join(path.relative_to(ROOT).parts[:-1][:2])
            found[package] += [mutant for line, mutant in mutants_of(file, path.read_text()) if line in run]
    chosen = choose(found, arguments.count, random.Random(arguments.seed))
    own = json.loads(arguments.own.read_text()) if arguments.own is not None else []
    MUTANTS.write_text(json.dumps([*map(asdict, chosen), *own], indent=1) + "\n")
    for package, group in itertools.groupby(chosen, key=lambda mutant: "/".join(mutant.file.split("/")[:-1][:2])):
        print(f"{package}: {len(list(group))} of {len(found[package])}")


def choose(found: dict[str, list[Mutant]], count: int, rng: random.Random) -> list[Mutant]:
    """Choose ``count`` mutants: packages by the square root of what they offer, kinds in turn, one a function."""
    weights = {package: len(mutants) ** 0.5 for package, mutants in sorted(found.items()) if mutants}
    total = sum(weights.values())
    shares = {package: max(1, round(count * weight / total)) for package, weight in weights.items()}
    while (excess := sum(shares.values()) - count) != 0:
        largest = max(shares, key=lambda package: shares[package])
        shares[largest] -= 1 if excess > 0 else -1
    chosen: list[Mutant] = []
    for package, share in shares.items():
        by_kind: defaultdict[str, list[Mutant]] = defaultdict(list)
        for mutant in rng.sample(found[package], len(found[package])):
            by_kind[mutant.kind].append(mutant)
        turns = itertools.chain.from_iterable(itertools.zip_longest(*(by_kind[kind] for kind in sorted(by_kind))))
        taken: dict[tuple[str, str], Mutant] = {}
        for mutant in turns:
            if mutant is not None and len(taken) < share:
                taken.setdefault((mutant.file, mutant.function), mutant)
        chosen += taken.values()
    return chosen


def run(arguments: argparse.Namespace) -> None:
    """Plant one mutant after another in a copy of each job, and note what became of it."""
    measured, entries = json.loads(MEASURED.read_text()), json.loads(MUTANTS.read_text())
    numbers = [number for number in range(len(entries)) if not arguments.only or number in arguments.only]
    with tempfile.TemporaryDirectory(prefix="vtp-mutants-") as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        copies: Queue[Path] = Queue()
        for job in range(arguments.jobs):
            copies.put(_copy(Path(folder) / str(job)))
        standing = _standing(Path(folder) / "0")
        # What killed a mutant before is tried, whether it was measured or not.
        killers = {name: UNMEASURED_S for entry in entries for name in _killers(entry)}
        measured["durations_s"] = {n: s for n, s in (killers | measured["durations_s"]).items() if n in standing}

        def plant_and_run(number: int) -> tuple[int, Mutant, str]:
            copy = copies.get()
            try:
                subprocess.run(["git", "checkout", "-q", "."], cwd=copy, check=True)
                mutant = Mutant(**{name: entries[number][name] for name in Mutant.__slots__})
                return number, mutant, _fate(mutant, copy, measured, _killers(entries[number]), arguments.pace)
            finally:
                copies.put(copy)

        for done in as_completed([pool.submit(plant_and_run, number) for number in numbers]):
            number, mutant, fate = done.result()
            entries[number][arguments.column] = fate
            MUTANTS.write_text(json.dumps(entries, indent=1) + "\n")
            print(f"{number:3} {fate:60} {mutant.file}:{mutant.function}: {mutant.old} -> {mutant.new}", flush=True)


def _standing(copy: Path) -> set[str]:
    """Return the names of the default tests that stand in the copy: a test that is gone would count as a kill."""
    _, output = _pytest(copy, ["--collect-only", "-q", "-m", "not full", "tests"], timeout_s=600.0)
    return {line.strip() for line in output.splitlines() if "::" in line}


def _killers(entry: dict[str, Any]) -> set[str]:
    """Return the tests that killed this mutant in any run before: they come first."""
    return {fate.partition(" by ")[2] for fate in map(str, entry.values()) if fate.startswith("killed ")}


def _fate(mutant: Mutant, copy: Path, measured: dict[str, Any], killers: set[str], pace: float) -> str:
    file = mutant.apply(copy)
    if file is None:
        return "the line no longer stands"
    durations: dict[str, float] = measured["durations_s"]
    entering = {*measured["tests"].get(f"{file}:{mutant.function}", ()), *killers}
    names = [name for name in entering if durations.get(name, SLOWEST_TEST_S) < SLOWEST_TEST_S]
    names = _spread(names, durations, killers, f"{mutant.file} {mutant.function}")
    if not names:
        return "no test known that enters it"
    start_s = time.monotonic()
    while names and (left_s := BUDGET_S * pace - (time.monotonic() - start_s)) > 0:
        batch = _fitting(names, durations, left_s)
        names = names[len(batch) :]
        # A test that hangs is one that fails; one that is merely late has killed nothing.
        words = ["-x", "-q", "--no-header", f"--timeout={HANG_S * pace}", *batch]
        code, output = _pytest(copy, words, timeout_s=left_s + HANG_S * pace)
        if code is None:
            return f"survived {BUDGET_S * pace:.0f} s"
        # All of them stand, so a usage error says that the mutant keeps their files from being collected.
        if code != 0:
            failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
            by = failed[0] if failed else f"exit code {code}"
            return f"killed in {time.monotonic() - start_s:.0f} s by {by}"
    return "survived" if not names else f"survived {BUDGET_S * pace:.0f} s"


def _spread(names: Sequence[str], durations: dict[str, float], killers: set[str], where: str) -> list[str]:
    """Put tests of the same subject first, by their names; of those the quickest case of every test before the second.

    >>> durations = {"layout::a[1]": 1.0, "layout::a[2]": 2.0, "layout::b": 3.0, "x::c": 0.1}
    >>> _spread(list(durations), durations, set(), "vtp_plugin/plan/layout/pipeline_layout.py f")
    ['layout::a[1]', 'layout::b', 'layout::a[2]', 'x::c']
    """
    turns: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    subject = _words(where)
    ordered = [
        (name not in killers, -len(subject & _words(name.partition("[")[0])), next(turns[name.partition("[")[0]]), name)
        for name in sorted(names, key=lambda name: (name not in killers, durations[name], name))
    ]
    return [name for *_, name in sorted(ordered, key=lambda row: (*row[:3], durations[row[3]], row[3]))]


def _words(text: str) -> set[str]:
    """Return the words of a path or name, without their plural.

    >>> sorted(_words("plan/boundary/strategies/slices.py plan_sliced"))
    ['boundary', 'plan', 'slice', 'sliced', 'strategie']
    """
    return {word.removesuffix("s").lower() for word in re.split(r"[\W_]+", text)} - {"py", "test", "vtp", "plugin", ""}


def _fitting(names: Sequence[str], durations: dict[str, float], limit_s: float) -> list[str]:
    """Return the first names whose tests should end in time, at least one and at most 200."""
    spent_s = itertools.accumulate(durations[name] * 1.2 + 0.02 for name in names)
    return [name for name, spent in zip(names[:200], spent_s, strict=False) if spent < limit_s] or list(names[:1])


def _copy(target: Path) -> Path:
    """Make a copy of what git tracks, as it is now, with a history of its own to go back to."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.rstrip("\0").split("\0"):
        source = ROOT / name
        if source.exists() or source.is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)
    for words in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=m", "-c", "user.email=m@m", "commit", "-qm", "copy"],
    ):
        subprocess.run(["git", *words], cwd=target, check=True)
    return target


def _pytest(copy: Path, words: Sequence[str], *, timeout_s: float, **environment: str) -> tuple[int | None, str]:
    """Run pytest in the copy; return its exit code, or None where it had to be ended, and what it wrote."""
    with tempfile.TemporaryFile("w+") as output:
        code = _ended(_started(copy, words, output, environment), timeout_s)
        output.seek(0)
        return code, output.read()


def _started(copy: Path, words: Sequence[str], output: IO[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=copy,
        env={
            **os.environ,
            "PYTHONPATH": str(copy),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **environment,
        },
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # pool workers end when their parent is gone
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None


def _durations(report: Path) -> dict[str, float]:
    """Return the seconds of every test that passed, by its name as pytest takes it."""
    return {
        _test_name(case.get("file", ""), case.get("classname", ""), case.get("name", "")): float(case.get("time", "0"))
        for case in ElementTree.parse(report).iter("testcase")
        if case.find("failure") is None and case.find("error") is None and case.find("skipped") is None
    }


def _test_name(file: str, owner: str, name: str) -> str:
    """Return the name of a test as pytest takes it.

    >>> _test_name("tests/unit/test_a.py", "tests.unit.test_a.TestB", "test_c[1]")
    'tests/unit/test_a.py::TestB::test_c[1]'
    """
    classes = owner.removeprefix(file.removesuffix(".py").replace("/", ".")).split(".")[1:]
    return "::".join([file, *classes, name])


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    measured = commands.add_parser("measure", help="run the default tests once, traced")
    measured.add_argument("tests", nargs="*", default=["tests"])
    measured.add_argument("--add", action="store_true", help="keep what was measured of other tests, of the same code")
    measured.set_defaults(run=measure)
    planted = commands.add_parser("plant", help="choose mutants and write them down")
    planted.add_argument("--count", type=int, default=60)
    planted.add_argument("--seed", type=int, default=1)
    planted.add_argument("--own", type=Path, help="file of others, such as tests/mutants/own.json: old faults put back")
    planted.set_defaults(run=plant)
    ran = commands.add_parser("run", help="see which of them the tests kill")
    ran.add_argument("--only", type=int, nargs="*", help="numbers of mutants")
    ran.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    ran.add_argument("--pace", type=float, default=1.0, help="factor for the limits of time, on a machine that is busy")
    ran.add_argument("--column", default="now", help="under which name the result is kept")
    ran.set_defaults(run=run)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
