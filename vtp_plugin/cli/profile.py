"""``profile``: time the parts of a model on one card, or the links between all, for the file of a cluster."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import vtp_plugin
from vtp_plugin.api import choose_device, current_session
from vtp_plugin.cli.parser import Parser, read_sizes, with_values, write_file
from vtp_plugin.cli.progress_bar import progress
from vtp_plugin.cli.run_flags import add_run_flags, check_unknown
from vtp_plugin.cli.search_request import features_of, read_any_list
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.mindspeed import has_mindspeed, import_adaptor
from vtp_plugin.host.versions import find_host
from vtp_plugin.plan.model.gpt_model import GPTModel
from vtp_plugin.tune.cluster.machines import Location, Origin, Part, Time
from vtp_plugin.tune.cluster.profile_files import write_links, write_profile
from vtp_plugin.tune.fit.as_flags import without

if TYPE_CHECKING:
    from vtp_plugin.session import Session

_TEXT = """\
One process on one card of each kind, without its peers, and without a list: sizes 1, 2, 4 and 8, or --tp-sizes, are
timed one after another, each as rank 0 of a stage whose other ranks answer at once with what it sends. So messages cost
nothing here; --links, started on all ranks by the run's launcher, times those. What is to be done with the files:
docs/search.md."""
_OWN = ("--out", "--tp-sizes", "--micro-batch-sizes", "--seq-lengths", "--rounds", "--kind")
_MOST_CARDS = 8


def add_arguments(parser: Parser) -> None:
    """Declare the flags."""
    parser.description = _TEXT
    add_run_flags(parser, has_layout=False)
    group = parser.add_argument_group("Of the profile")
    group.add_argument("--out", type=Path, required=True, metavar="FILE.toml", help="what is written")
    group.add_argument("--tp-sizes", type=read_sizes, metavar="1,2,4", help="default: powers of two that fit, up to 8")
    group.add_argument("--micro-batch-sizes", type=read_sizes, metavar="1,2,4", help="instead of --micro-batch-size")
    group.add_argument("--seq-lengths", type=read_sizes, metavar="4096,8192", help="instead of --seq-length")
    group.add_argument("--rounds", type=int, default=10, metavar="N", help="of which the median counts, default 10")
    group.add_argument("--links", action="store_true", help="time the links between all ranks of the launcher instead")
    group.add_argument(
        "--kind", default="", metavar="NAME", help="with --links: of this rank's card, as in the cluster"
    )


def run(options: argparse.Namespace) -> None:
    """Time and write."""
    if not options.out.resolve().parent.is_dir():
        raise ConfigError(
            f"--out {options.out}: there is no folder {options.out.parent}; make it, or choose another file"
        )
    if options.links:
        _links(options)
        return
    check_unknown(options.unknown)
    case = _case(options)
    ask, model = read_any_list(case, "profile")
    if options.rounds < 1:
        raise ConfigError(f"--rounds {options.rounds}; give at least one")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("profile times one card alone; start it without a launcher, or with --links")
    powers = [1 << number for number in range(_MOST_CARDS.bit_length())]
    sizes = options.tp_sizes or [size for size in powers if not ask.problems_of_size(size)]
    for size in sizes:
        if problems := ask.problems_of_size(size):
            raise ConfigError(f"--tp-sizes {size}: {problems[0]}")
    model_of = features_of(case, model)
    with _device(options) as session:
        write_file(options.out, _times(options, sizes, model, model_of, session), flag="--out")


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
    if has_mindspeed():
        import_adaptor()  # its layers are timed
    vtp_plugin.apply(device=options.vtp_device or "auto")
    try:
        session = current_session()
        assert session is not None
        yield session
    finally:
        vtp_plugin.revert()


def _times(
    options: argparse.Namespace,
    sizes: Sequence[int],
    model: GPTModel,
    model_of: Mapping[str, object],
    session: Session,
) -> str:
    # It needs torch, which other commands do without.
    from vtp_plugin.patches.profile_parts import ProfileRequest, num_cases, time_parts

    platform = session.choose_platform()
    layers = () if model.experts is None else model.experts.layers
    kinds: list[Part] = ["dense"] if not all(layers) or not layers else []
    argv = ProfileRequest(
        words=_megatron_argv(options.argv),
        sizes=sizes,
        vocabulary=model.vocab,
        micro_batch_sizes=options.micro_batch_sizes or [options.micro_batch_size],
        seq_lengths=options.seq_lengths or [options.seq_length],
        kinds=[*kinds, "experts"] if any(layers) else kinds,
        num_rounds=options.rounds,
    )
    times: list[Time] = []
    with progress(num_cases(argv), "timed", is_bytes=False) as tell:
        try:
            for found in time_parts(argv, platform):
                times += found
                tell(1)
        except KeyboardInterrupt:
            print(f"vtp_plugin: interrupted; {options.out} has what was timed so far", file=sys.stderr)
    origin = Origin(name=options.out.name, device=platform.card_name(), megatron=find_host()[1].version, model=model_of)
    return write_profile(origin, times)


def _megatron_argv(argv: Sequence[str]) -> list[str]:
    """Leave out the command and its own flags."""
    return [word for word in without(argv[1:], _OWN) if word not in ("--links", "--fake-process-group")]


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
