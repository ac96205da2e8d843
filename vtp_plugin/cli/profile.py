"""``profile``: time the parts of a model on one card, or the links between all, for the file of a cluster."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import vtp_plugin
from vtp_plugin.api import choose_device, current_session
from vtp_plugin.cli.command_base import Parser, check_folder, print_answer, read_sizes, with_values, write_file
from vtp_plugin.cli.run_flags import add_run_flags, check_unknown
from vtp_plugin.cli.search_request import features_of, read_any_list
from vtp_plugin.cli.terminal import progress
from vtp_plugin.errors import ConfigError, VtpError
from vtp_plugin.host.mindspeed import has_mindspeed, import_adaptor
from vtp_plugin.host.versions import find_host
from vtp_plugin.plan.model.gpt_model import GPTModel
from vtp_plugin.tune.cluster.machines import Links, Location, Origin, Part, Time, scatter
from vtp_plugin.tune.cluster.read_cluster import write_links, write_profile
from vtp_plugin.tune.fit.fit_layout import without
from vtp_plugin.util.text import in_digits, own_command, plain

if TYPE_CHECKING:
    from vtp_plugin.session import Session

_OWN = ("--out", "--tp-sizes", "--micro-batch-sizes", "--seq-lengths", "--rounds", "--kind")
_MOST_CARDS = 8
_NAMES = {"dense": "layer", "experts": "layer with experts"}
_LINES_SHOWN = 40
# Rounds on a quiet machine scatter by a few percent; above this another process took turns with them.
_MOST_SCATTER = 0.2


def add_arguments(parser: Parser) -> None:
    """Declare the flags."""
    parser.description = run.__doc__
    add_run_flags(parser, has_layout=False)
    group = parser.add_argument_group("Of the profile")
    group.add_argument("--out", type=Path, required=True, metavar="FILE.toml", help="what is written")
    group.add_argument("--tp-sizes", type=read_sizes, metavar="1,2,4", help="default: powers of two that fit, up to 8")
    group.add_argument("--micro-batch-sizes", type=read_sizes, metavar="1,2,4", help="instead of --micro-batch-size")
    group.add_argument("--seq-lengths", type=read_sizes, metavar="4096,8192", help="instead of --seq-length")
    group.add_argument("--rounds", type=int, default=10, metavar="N", help="of which the median counts, default 10")
    group.add_argument("--links", action="store_true", help="time the links between all ranks of the launcher instead")
    group.add_argument(
        "--kind", default="", metavar="NAME", help="with --links: of this rank's device, as in the cluster"
    )


def run(options: argparse.Namespace) -> None:
    """One process on one device of each kind, without its peers, and without a list: sizes 1, 2, 4 and 8, or
    --tp-sizes, are timed one after another, each as rank 0 of a stage whose other ranks answer at once with what it
    sends. So messages cost nothing here; --links, started on all ranks by the run's launcher, times those. What is
    to be done with the files: docs/guides/search.md.
    """
    check_folder(options.out, flag="--out")
    if options.links:
        _links(options)
        return
    check_unknown(options.unknown, are_ignored=False)  # Megatron gets them
    case = _case(options)
    ask, model = read_any_list(case, "profile")
    if options.rounds < 1:
        raise ConfigError(f"--rounds {options.rounds}; give at least one")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("profile times one device alone; start it without a launcher, or with --links")
    powers = [1 << number for number in range(_MOST_CARDS.bit_length())]
    sizes = options.tp_sizes or [size for size in powers if not ask.problems_of_size(size)]
    for size in sizes:
        if problems := ask.problems_of_size(size):
            raise ConfigError(f"--tp-sizes {size}: {problems[0]}")
    model_of = features_of(case, model)
    with _device(options) as session:
        _profile(options, sizes, model, model_of, session)


def _case(options: argparse.Namespace) -> argparse.Namespace:
    """Give the flags of the longest microbatch that is timed, for what is checked before."""
    micro_batch_size = (options.micro_batch_sizes or [options.micro_batch_size])[0]
    return with_values(
        options,
        micro_batch_size=micro_batch_size,
        seq_length=max(options.seq_lengths) if options.seq_lengths else options.seq_length,
        global_batch_size=micro_batch_size,  # no batch is run; what divides it does not matter
    )


@contextmanager
def _device(options: argparse.Namespace) -> Iterator[Session]:
    """Find the card, and let Megatron use it."""
    choose_device(options.vtp_device or "auto")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns about optional packages
        if has_mindspeed():
            import_adaptor()  # its layers are timed
        vtp_plugin.apply(device=options.vtp_device or "auto")
    try:
        session = current_session()
        assert session is not None
        yield session
    finally:
        vtp_plugin.revert()


def _profile(
    options: argparse.Namespace,
    sizes: Sequence[int],
    model: GPTModel,
    model_of: Mapping[str, object],
    session: Session,
) -> None:
    # It needs torch, which other commands do without.
    from vtp_plugin.patches.profile_parts import ProfileRequest, num_cases, time_parts

    platform = session.choose_platform()
    layers = () if model.experts is None else model.experts.layers
    kinds: list[Part] = ["dense"] if not all(layers) or not layers else []
    asked = ProfileRequest(
        words=_megatron_argv(options.argv),
        sizes=sizes,
        vocabulary=model.vocab,
        micro_batch_sizes=options.micro_batch_sizes or [options.micro_batch_size],
        seq_lengths=options.seq_lengths or [options.seq_length],
        kinds=[*kinds, "experts"] if any(layers) else kinds,
        num_rounds=options.rounds,
    )
    origin = Origin(name=options.out.name, device=platform.card_name(), megatron=find_host()[1].version, model=model_of)
    times: list[Time] = []
    scatters: list[float] = []
    stdout, stderr = sys.stdout, sys.stderr
    with progress(num_cases(asked), "profile", is_bytes=False) as tell, _quiet():
        if not options.json:
            about = f"Megatron {origin.megatron}, medians of {options.rounds} rounds, forward + backward"
            print(f"{origin.device}, {about}", file=stdout, flush=True)
        try:
            for found, rounds_s in time_parts(asked, session):
                times += found
                scatters.append(scatter(rounds_s))
                tell(1)
                if not options.json:
                    print(_line_of(found, scatters[-1]), file=stdout, flush=True)
        except KeyboardInterrupt:
            print(f"vtp_plugin: interrupted; {options.out} has what was timed so far", file=stderr)
    write_file(options.out, write_profile(origin, times), flag="--out")
    worst = max(scatters, default=0.0)
    _say_next(options, len(times), "[cards.NAME]", _about_scatter(worst), scatter=worst)


def _about_scatter(worst: float) -> Iterator[str]:
    """Warn of rounds that lie too far apart for their median to be believed."""
    if worst > _MOST_SCATTER:
        yield (
            "warning: the machine was too busy to believe these times: rounds of one line scatter by "
            f"{100 * worst:.0f} %, above {100 * _MOST_SCATTER:.0f} %; profile again when nothing else runs there"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what Megatron prints to itself; show the end of it if the block fails.

    Raises:
        ConfigError: Megatron's parser takes the flags for wrong.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        try:
            with redirect_stdout(file), redirect_stderr(file), _logging_to(file):
                yield
        except SystemExit as error:
            said = f"{_end_of(file, 1)}; Megatron's parser rejects the flags; give those of a run"
            raise ConfigError(said) from error
        except VtpError:
            raise
        except Exception:
            print(f"the last lines that Megatron printed:\n{_end_of(file, _LINES_SHOWN)}", file=sys.stderr)
            raise


@contextmanager
def _logging_to(file: TextIO) -> Iterator[None]:
    """Let the root logger's handlers write there, which keep the streams that they were made with."""
    handlers = [each for each in logging.getLogger().handlers if isinstance(each, logging.StreamHandler)]
    before = [(each, each.stream) for each in handlers if not isinstance(each, logging.FileHandler)]
    for handler, _ in before:
        handler.setStream(file)
    try:
        yield
    finally:
        for handler, stream in before:
            handler.setStream(stream)


def _end_of(file: TextIO, most: int) -> str:
    file.seek(0)
    return plain("\n".join(file.read().splitlines()[-most:]))


def _line_of(found: Sequence[Time], scattered: float) -> str:
    """Write one measurement, such as of a layer and of the ends of the model, with the scatter of its rounds."""
    first, rounds = found[0], f"; rounds scatter by {100 * scattered:.0f} %"
    if first.part == "update":
        return f"tp {first.tp}: optimizer {in_digits(1e3 * first.forward_s)} ms for each million parameters{rounds}"
    parts = (
        f"{_NAMES.get(time.part, time.part)} {in_digits(1e3 * time.forward_s)} + {in_digits(1e3 * time.backward_s)} ms"
        + ("" if time.weights_s is None else f" ({in_digits(1e3 * time.weights_s)} ms for gradients of weights)")
        for time in found
    )
    how = ", recomputed" if first.is_recomputed else ""
    return f"tp {first.tp}, {first.micro_batch_size} x {first.seq_length} tokens{how}: {', '.join(parts)}{rounds}"


def _say_next(options: argparse.Namespace, number: int, table: str, lines: Iterable[str] = (), **known: float) -> None:
    """Name what was written, and what to do with it, behind other lines; `known` is for ``--json``."""
    next_one = (
        f'next: write profile = "{options.out.name}" under {table} in the cluster file (docs/guides/search.md), then'
    )
    command = f"    {own_command()} search --cluster CLUSTER.toml [Megatron's flags of the model]"
    text = (*lines, f"wrote {options.out}: {number} times", next_one, command)
    print_answer(options, {"out": options.out, "num_times": number, **known}, text)


def _megatron_argv(argv: Sequence[str]) -> list[str]:
    """Leave out the command and its own flags."""
    return [word for word in without(argv[1:], _OWN) if word not in ("--json", "--links", "--fake-process-group")]


def _links(options: argparse.Namespace) -> None:
    """Time links on all ranks; rank 0 writes the file."""
    import torch.distributed as dist  # which other commands do without

    from vtp_plugin.runtime.comm.ping import time_links

    if "RANK" not in os.environ:
        raise ConfigError("--links needs all ranks; start it with the run's launcher, such as torchrun")
    location = Location(node=options.vtp_node or socket.gethostname(), site=options.vtp_site or "", kind=options.kind)
    with _device(options) as session:
        platform = session.choose_platform()
        platform.module().set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(platform.backend, timeout=timedelta(seconds=session.config.timeout_s))
        try:
            found = time_links(platform, location)
        finally:
            dist.destroy_process_group()
    if found is not None:
        write_file(options.out, write_links(found), flag="--out")
        lines = [*_lines_of_links(found)]
        _say_next(options, len(lines), "[links]", lines)


def _lines_of_links(links: Links) -> Iterator[str]:
    """Write one line for each link that was timed."""
    places = {"inside a node": links.inside, "between nodes": links.between}
    named = [(f"{place} {name}".rstrip(), link) for place, each in places.items() for name, link in each.items()]
    named += [(f"between sites {' and '.join(sites)}", link) for sites, link in links.across.items()]
    for name, each in links.sums.items():
        named += [(f"all-reduce of {number} ranks {name}".rstrip(), link) for number, link in each.items()]
    for name, link in named:
        at_once = f", {link.at_once} at a time" if link.at_once else ""
        yield f"{name}: {in_digits(1e6 * link.latency_s)} us, {in_digits(link.bytes_per_s / 1e9)} GB/s{at_once}"
