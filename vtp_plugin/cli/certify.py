"""``certify``: train a small model on the layouts that fit these machines, and compare each with the uniform run.

``certify -- SCRIPT FLAGS`` does so with a script of the user's, and its list.

Exit code 0: every run went as it should; 1: one did not, or a report speaks of something else; 2: bad usage.
"""

from __future__ import annotations

import argparse
import json
import os
import platform as python_platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import vtp_plugin
from vtp_plugin.certify.compare import Numbers, assemble, layer_of
from vtp_plugin.certify.layouts import CertifiedRun, Choice, choose, choose_for_script, ranks_of
from vtp_plugin.certify.report import (
    CertifyReport,
    Row,
    beside_floor,
    blame,
    conclude,
    digest_of,
    judge_row,
    problems_of,
    text_of,
    unjudged,
)
from vtp_plugin.cli.command_base import Parser, add_json_flag, check_folder, print_answer, write_file
from vtp_plugin.config import VtpConfig
from vtp_plugin.config.resolve import check_command_line
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.versions import find_host
from vtp_plugin.trace.compare_steps import join_files
from vtp_plugin.trace.stretches import read_files
from vtp_plugin.util.text import own_command
from vtp_plugin.util.typed_json import read_bytes, read_typed

if TYPE_CHECKING:
    from vtp_plugin.cli.certify_workers import Answer, Workers

_PACKAGES = ("torch", "torch_npu", "mindspeed", "transformer_engine")
_CPU_RANKS, _MOST_RANKS = 3, 8
# So many ranks may share one GPU, if NCCL is 2.30 or later; each rank's kernels must find room beside the others'.
_SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}


def add_arguments(parser: Parser) -> None:
    """Declare the flags."""
    parser.epilog = "Exit code 0: every run went as it should; 1: one did not, or a report speaks of something else."
    parser.add_argument("--short", action="store_true", help="a few layouts, under 90 s on two cores")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="also write the report, to send it")
    parser.add_argument("--check", type=Path, metavar="REPORT", help="only: does a report speak of what is installed")
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="processes that it starts itself; default: one for each device, up to 8; 3 on CPUs. With more than there "
        "are GPUs they share them (NCCL 2.30). A launcher such as torchrun starts others",
    )
    parser.add_argument("--device", default="auto", metavar="auto|cuda|npu|cpu", help="default: auto")
    parser.add_argument("--timeout-s", type=float, default=120.0, metavar="S", help="longest time of one run; 120")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="for start weights; several machines need a shared one"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="give the script so many layers")
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="-- SCRIPT FLAGS",
        help="compare a script of yours with its uniform runs, such as -- pretrain_gpt.py --vtp-size-list 1,4 ...",
    )
    add_json_flag(parser)


def run(options: argparse.Namespace) -> None:
    """Certify, or check a report; leave with the exit code."""
    options.script = options.script[1:] if options.script[:1] == ["--"] else options.script
    if options.unknown:
        raise ConfigError(f"{options.unknown[0]} is unknown; see: {own_command()} certify --help")
    if options.check is not None:
        _check(options)
    if options.out is not None:
        check_folder(options.out, flag="--out")
    device = VtpConfig(device=options.device).device
    if options.script and not Path(options.script[0]).is_file():
        raise ConfigError(f"script {options.script[0]} does not exist; give the path of the training script")
    with _workers(options, device) as (workers, choice, num_ranks, card):
        is_first = 0 in workers.ranks
        begin_s = time.monotonic()
        rows, conclusion = _certify(workers, choice, options)
        report = CertifyReport(
            versions=_versions(),
            sources=digest_of(Path(vtp_plugin.__file__).parent),
            device=card,
            num_ranks=num_ranks,
            is_short=options.short,
            conclusion=conclusion,
            rows=rows,
            left_out=choice.left_out,
            seconds=round(time.monotonic() - begin_s),
        )
    if is_first:
        print_answer(options, report, text_of(report))
        if options.out is not None:
            write_file(options.out, json.dumps(asdict(report), indent=1) + "\n", flag="--out")
            print(f"wrote {options.out}", file=sys.stderr)
    sys.exit(0 if report.is_well else 1)


def _certify(workers: Workers, choice: Choice, options: argparse.Namespace) -> tuple[tuple[Row, ...], str]:
    """Run and judge all that was chosen; of a user's script also say why it differs."""
    references: dict[str, list[Numbers]] = {}
    link: Sequence[float] = ()
    rows: list[Row] = []
    for job in choice.runs:
        answers = workers.run(job)
        if 0 in workers.ranks:
            took = f"{max(answer.after_s for answer in answers):.1f} s"
            print(f"ran {job.shows} ({job.layout}), {took}", file=sys.stderr, flush=True)
        failed = [answer.line for answer in answers if answer.numbers is None]
        known = next((line for line in failed if "rank" not in line), failed[0] if failed else "")
        if failed and options.script and job.role not in ("uniform", "list"):
            raise ConfigError(
                f"{options.script[0]} with equal stages: {known}; certify compares with what it computes then"
            )
        if job.killed_rank is not None:
            rows.append(_judge_kill(job, answers))
        elif failed:
            rows.append(unjudged(job, "failed", known))
        elif job.role == "reference":
            references.setdefault(job.training, []).append(_numbers(answers))
        elif job.role == "start":
            link = link or next(answer.numbers.link for answer in answers if answer.numbers is not None)
        elif job.training not in references:
            rows.append(unjudged(job, "failed", "there is no uniform run to compare with"))
        else:
            step_s = max(answer.numbers.step_s for answer in answers if answer.numbers is not None)
            reference, *changed = references[job.training]
            row = judge_row(job, _numbers(answers), step_s, reference, changed)
            if link and job.is_traced:
                with suppress(ConfigError):  # a short run ends before any of its steps is traced to its end
                    row = beside_floor(row, join_files(read_files(Path(workers.trace)))[-1].shares, link)
            rows.append(row)
            if rows[-1].verdict == "differs" and (layer := layer_of(rows[-1].first)):
                uniform = next(one for one in choice.runs if one.role == "reference" and one.training == job.training)
                *_, again = [workers.run(one.with_fed(layer)) for one in (uniform, job)]
                if all(answer.numbers is not None for answer in again):
                    rows[-1] = blame(rows[-1], _numbers(again), reference, changed)
        if job.role == "again" and rows[-1].verdict != "equal":
            raise ConfigError(
                f"two equal runs of {options.script[0]} cannot be compared: {rows[-1].note}; nothing can be "
                "judged by them; let it draw from --seed alone"
            )
    return conclude(rows, choice.left_out) if options.script else (tuple(rows), "")


def _numbers(answers: list[Answer]) -> Numbers:
    return assemble([answer.numbers for answer in answers if answer.numbers is not None])


def _judge_kill(job: CertifiedRun, answers: list[Answer]) -> Row:
    """Tell whether the ranks that live have named the one that was killed."""
    others = [answer for rank, answer in enumerate(answers) if rank != job.killed_rank]
    named = [answer for answer in others if f"rank {job.killed_rank}" in answer.line]
    died_s = answers[job.killed_rank or 0].after_s
    took_s = max((answer.after_s - died_s for answer in named), default=0.0)
    note = f"{len(named)} of {len(others)} ranks named rank {job.killed_rank}, {took_s:.1f} s after it died"
    has_hung = any(answer.numbers is not None or "no end" in answer.line for answer in others)
    return unjudged(job, "named" if named and not has_hung else "not named", note)


@contextmanager
def _workers(options: argparse.Namespace, device: str) -> Iterator[tuple[Workers, Choice, int, str]]:
    """Choose the runs and what starts them: give both, the number of ranks, and the kind of device."""
    find_host()  # one line where Megatron or torch is missing
    from vtp_plugin.cli.certify_workers import Workers
    from vtp_plugin.platform.detect import detect
    from vtp_plugin.runtime.health.meeting_store import is_agent_store, serve

    platform = detect(device)  # type: ignore[arg-type]
    num_devices = 0 if platform.name == "cpu" else platform.module().device_count()
    card = "CPU" if platform.name == "cpu" else platform.card_name()
    environment = {
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCH_GLOO_LAZY_INIT": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # each run has a store of its own, which a supervisor keeps
    }
    script, *words = options.script or [_own_script()]
    words += ["--num-layers", str(options.layers)] * (options.layers is not None)
    if "RANK" in os.environ:
        if options.ranks is not None:
            raise ConfigError(f"--ranks {options.ranks}; the launcher has started the ranks; leave it out")
        rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if options.folder is None and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < num_ranks:
            raise ConfigError("the ranks are on several machines; give --folder DIR, which all of them reach")
        address, port, ranks = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), [rank]
        is_server = rank == 0 and not is_agent_store(os.environ)
    else:
        on_cpus = max(_CPU_RANKS, ranks_of(words))
        num_ranks = options.ranks or (min(num_devices, _MOST_RANKS) if num_devices else on_cpus)
        address, port, ranks, is_server = "127.0.0.1", 0, list(range(num_ranks)), True
        if platform.name == "cpu":
            environment["GLOO_SOCKET_IFNAME"] = "lo"
    if options.script:
        check_command_line([script, *words], VtpConfig(), {})
        choice = choose_for_script(words, num_ranks)
    else:
        choice = choose(num_ranks, is_short=options.short, without=_not_here(card))
    if 0 < num_devices < len(ranks):
        environment |= {**_SHARED, "CERTIFY_NUM_DEVICES": str(num_devices)}
    from datetime import timedelta

    from torch.distributed import TCPStore

    wait = timedelta(seconds=1800)
    store = serve(address, port, 1800) if is_server else TCPStore(address, port, is_master=False, timeout=wait)
    environment["MASTER_ADDR"] = address
    with tempfile.TemporaryDirectory(prefix="vtp-certify-", dir=options.folder) as folder:
        workers = Workers(
            ranks=ranks,
            store=store,
            environment=environment,
            device=platform.name,
            timeout_s=options.timeout_s,
            script=script,
            folder=folder,
        )
        yield workers, choice, num_ranks, card


def _own_script() -> str:
    """Give the script of Megatron's tree, or for a wheel, which has none, ours."""
    found = find_spec("megatron.training")
    if found is None or found.origin is None:
        raise ConfigError(
            "there is no megatron.training, which certify's runs need; put your Megatron-LM on PYTHONPATH"
        )
    theirs = Path(found.origin).parents[2] / "pretrain_gpt.py"
    ours = Path(vtp_plugin.__file__).parent / "patches" / "certified" / "certified_gpt.py"
    return str(theirs if theirs.is_file() else ours)


def _not_here(card: str) -> dict[str, str]:
    """Say what these machines cannot run, and why."""
    if card == "CPU" or find_spec("apex") is not None:
        return {}
    needs = "on this device Megatron's own layers need Apex for sequence parallelism"
    return dict.fromkeys(("sequence parallelism", "interleaved", "experts", "adapters"), needs)


def _versions() -> dict[str, str]:
    found = {"vtp_plugin": vtp_plugin.__version__, "Python": python_platform.python_version()}
    found["megatron-core"] = find_host()[1].version
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _check(options: argparse.Namespace) -> None:
    """Say whether a report speaks of what is installed; leave with the exit code."""
    try:
        report = read_typed(CertifyReport, read_bytes(options.check))
    except ValueError as error:
        raise ConfigError(f"--check {options.check} is no report: it {error}; give a file of certify --out") from None
    problems = list(problems_of(report, _versions(), digest_of(Path(vtp_plugin.__file__).parent)))
    answer = {"report": asdict(report), "problems": problems}
    about = (
        f"{report.device}, {report.num_ranks} ranks: {'all' if report.is_well else 'not all'} runs went as they should"
    )
    lines = [about, *(f"problem: {line}" for line in problems)]
    print_answer(options, answer, [*lines, f"it speaks of {'something else' if problems else 'what is installed'}"])
    sys.exit(1 if problems or not report.is_well else 0)
