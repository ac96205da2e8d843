"""``doctor``: try whether the plugin works in this environment, and report what is there.

Exit code 0: all is well; 1: problems, each with a line in the report; 2: bad usage.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import vtp_plugin
from vtp_plugin.api import choose_device
from vtp_plugin.cli.command_base import add_json_flag, as_json, named, print_answer
from vtp_plugin.cli.link_actions import report_listeners
from vtp_plugin.cli.terminal import progress
from vtp_plugin.config import VtpConfig
from vtp_plugin.errors import VtpError
from vtp_plugin.host.mindspeed import UNKNOWN, UNKNOWN_ADAPTOR, has_mindspeed, import_adaptor
from vtp_plugin.host.versions import family_of, find_megatron, find_torch, problems_of
from vtp_plugin.runtime.health.ask_store import test_rendezvous
from vtp_plugin.util.log import wrap
from vtp_plugin.util.text import own_command

if TYPE_CHECKING:
    from vtp_plugin.cli.terminal import Tell
    from vtp_plugin.config.flag import DeviceName
    from vtp_plugin.host.patching import PatchStatus

_RESILIENCY = "nvidia_resiliency_ext"
_OPTIONAL_PACKAGES = (
    "torch_npu", "mindspeed", "transformer_engine", "apex", _RESILIENCY,
)  # fmt: skip  # with them Megatron takes other paths
# Set by a launcher: with them the plugin would wait for the other ranks.
_LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_NUM_TRIALS = 3  # of the network, of the device, of the patches


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.epilog = f"Exit code 0: all is well; 1: problems; 2: bad usage. {_Report.__doc__ or ''}"
    parser.add_argument("--device", "--vtp-device", default="auto", metavar="auto|cuda|npu|cpu", help="default: auto")
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="also print why it is this device, interfaces, what listens where, launch commands for runs that resume "
        "after losses, each patch with its reason, and the table of Megatron's options",
    )
    parser.add_argument(
        "--rendezvous",
        metavar="HOST:PORT",
        help="test only whether the store of a run answers this machine there; with --verbose all else, too",
    )
    parser.add_argument(
        "--link",
        nargs="?",
        const="",
        metavar="FILE",
        help="print only what listens here and who can reach it; FILE: the file of a site whose firewall counts. Exit "
        "code 1: somebody outside machine and link can reach a run. Keys of --json: interfaces, listeners, problems",
    )
    add_json_flag(parser)


def run(options: argparse.Namespace) -> None:
    """Print the report, and leave with its exit code."""
    if options.unknown:
        raise VtpError(f"{options.unknown[0]} is unknown; see: {own_command()} doctor --help")
    if options.link is not None:
        report_listeners(options)
    device = VtpConfig(device=options.device).device
    report = _Report()
    if options.rendezvous is not None and not options.verbose:
        report.ask_store(options.rendezvous)  # at once: all else takes many seconds
    else:
        with progress(_NUM_TRIALS, "doctor", is_bytes=False) as tell:
            report.look(device, options.rendezvous, tell)
    exit_code = 1 if report.problems else 0
    patches = [named(one, "id", "state", "target", "skipped", "foreign_wrapper") for one in report.patches]
    lines = (piece for line in report.lines(options) for piece in wrap(line))
    print_answer(options, as_json(report) | {"patches": patches, "exit_code": exit_code}, lines)
    sys.exit(exit_code)


@dataclass(slots=True)
class _Report:
    """Keys of --json: `versions; host; mindspeed; platform; interfaces; listening; rendezvous; launchers (lines);
    patches: id, state, target, skipped, foreign_wrapper; warnings; problems; exit_code`.
    """

    versions: dict[str, str] = field(default_factory=dict[str, str])
    host: str | None = None
    mindspeed: str | None = None
    platform: str | None = None
    interfaces: list[str] = field(default_factory=list[str])
    listening: list[str] = field(default_factory=list[str])
    rendezvous: list[str] = field(default_factory=list[str])
    launchers: list[str] = field(default_factory=list[str])
    patches: tuple[PatchStatus, ...] = ()
    warnings: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])

    def look(self, device: DeviceName, rendezvous: str | None, tell: Tell) -> None:
        """Find out everything; a missing package ends the search."""
        torch, megatron = find_torch(), find_megatron()
        if torch is None or megatron is None:
            self.problems += problems_of(torch, megatron)
            return
        family = family_of(megatron.version)
        self.host = f"{family.name if family else 'unknown'} ({megatron.folder})"
        self.versions = {"vtp_plugin": vtp_plugin.__version__}
        self.versions |= {"torch": torch.version, "megatron-core": megatron.version}
        self.versions |= {name: number for name in _OPTIONAL_PACKAGES if (number := _version(name))}
        self.versions["Python"] = sys.version.split()[0]
        self.interfaces = list(_interfaces())
        try:
            self._try_network(rendezvous)
            tell(1, "device")
            self._try_platform(device)
            self._try_mindspeed(device)
            tell(1, "patches")
            self._try_patches(device)
        except VtpError as error:
            self.problems.append(str(error))
        except Exception as error:  # whatever importing torch or Megatron raises
            self.problems.append(f"{type(error).__name__}: {' '.join(str(error).split())}{self._way_out(str(error))}")

    def _way_out(self, error: str) -> str:
        """Say what to do about a package that breaks the import of Megatron's checkpoints; empty for other errors."""
        found = self.versions.get(_RESILIENCY)
        if found is None or _RESILIENCY not in error.replace("-", "_"):
            return ""
        return (
            f"; beside nvidia-resiliency-ext {found} megatron.core.dist_checkpointing cannot be imported; remove it or "
            "install the version that this Megatron asks for"
        )

    def _try_network(self, rendezvous: str | None) -> None:
        """Find out where a run that is started like this would listen, and ask the store of a run."""
        from vtp_plugin.plan.launch.launch_commands import describe_launchers
        from vtp_plugin.runtime.health.meeting_store import describe_listening

        self.listening = describe_listening(os.environ)
        self.launchers = describe_launchers(os.environ)
        if rendezvous is not None:
            self.ask_store(rendezvous)

    def ask_store(self, address: str) -> None:
        """Ask the store of a run."""
        self.rendezvous, is_well = test_rendezvous(address)
        if not is_well:
            self.problems.append(f"rendezvous {address}: {self.rendezvous[-1]}")

    def _try_platform(self, device: DeviceName) -> None:
        from vtp_plugin.platform.detect import detect

        platform = detect(device)
        self.platform = f"{platform.name}, backend {platform.backend} ({platform.reason})"

    def _try_mindspeed(self, device: DeviceName) -> None:
        """Import MindSpeed's adaptor, as a script of its does, so that the patches lie around those of MindSpeed."""
        if importlib.util.find_spec(UNKNOWN_ADAPTOR) is not None:
            self.warnings.append(UNKNOWN)
        if not has_mindspeed():
            return
        choose_device(device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.mindspeed = _describe_adaptor()

    def _try_patches(self, device: DeviceName) -> None:
        """Apply the patches as a U-shaped run does (it needs all of them), note their state, and revert them."""
        for name in _LAUNCHER_VARIABLES:
            os.environ.pop(name, None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron warns about optional packages
            vtp_plugin.apply(vtp_size_list=[1, 2, 2], layerwise_disaggregated=True, device=device, log_level="ERROR")
            try:
                self.patches = vtp_plugin.status()
            finally:
                vtp_plugin.revert()
        for patch in self.patches:
            if not patch.applied:
                self.problems.append(f"patch {patch.id} ({patch.target}) was not applied: {patch.skipped or 'lost'}")
            if patch.aliases_missing:
                self.problems.append(f"patch {patch.id} does not reach {', '.join(patch.aliases_missing)}")
            if _is_replaced(patch.target):
                self.problems.append(f"patch {patch.id} ({patch.target}) is still there after revert()")
        self._compare_targets()

    def _compare_targets(self) -> None:
        """Warn of functions that have changed since the patches were written for them."""
        from vtp_plugin.host.patching.pins import changed_targets, pins_of, read_pins
        from vtp_plugin.patches.registry import PINS

        found = pins_of(patch.target for patch in self.patches if not patch.skipped)
        installed = self.versions["megatron-core"]
        # A family has patches of its own, which were written against its own versions.
        pins = {known: pin for known, pin in read_pins(PINS).items() if family_of(known) == family_of(installed)}
        changed = changed_targets(pins, installed, found)
        self.warnings = [f"megatron-core: {line}; look whether the patch still fits it" for line in changed]

    def lines(self, options: argparse.Namespace) -> Iterator[str]:
        """Write the report as text; the verdict comes last."""
        if not self.versions and not self.rendezvous:
            if options.rendezvous is not None:
                yield f"rendezvous {options.rendezvous}: not tested; install what is missing first"
            yield f"verdict: {' | '.join(self.problems)}"
            return
        if self.versions:
            yield ", ".join(f"{name} {number}" for name, number in self.versions.items())
            yield f"Megatron {self.host}, device {(self.platform or 'none').partition(' (')[0]}"
            yield f"patches: {sum(one.applied for one in self.patches)} of {len(self.patches)} applied, then reverted"
        if self.rendezvous:
            yield "rendezvous"
            yield from (f"    {line}" for line in self.rendezvous)
        if options.verbose:
            yield from self._details()
        yield from (f"warning: {warning}" for warning in self.warnings)
        yield from (f"problem: {problem}" for problem in self.problems)
        number = len(self.problems)
        yield f"verdict: {number} problem{'s' if number > 1 else ''}, see above" if number else "verdict: fine"

    def _details(self) -> Iterator[str]:
        """Write what few users need."""
        from vtp_plugin.host.patching import format_status
        from vtp_plugin.host.rules.table.rows import format_table

        if self.mindspeed:
            yield f"MindSpeed: {self.mindspeed}"
        yield f"device: {self.platform or 'none'}"
        yield f"interfaces: {', '.join(self.interfaces)}"
        yield "a run that is started from here would listen for its ranks on"
        yield from (f"    {line}" for line in self.listening)
        yield "a run that resumes after losses (`docs/guides/lost-cards.md`) would be started with one of"
        yield from (f"    {line}" for line in self.launchers)
        yield from format_status(self.patches).splitlines()
        yield from ("", "Megatron's options with stages of unequal size", "", *format_table().splitlines(), "")


def _is_replaced(target: str) -> bool:
    """Tell whether a replacement of the plugin still stands for a target."""
    from vtp_plugin.host.patching.engine import MARKER
    from vtp_plugin.host.patching.record import resolve_target

    value = resolve_target(target).value
    accessor = getattr(value, "fget", None) or getattr(value, "__func__", value)
    return hasattr(accessor, MARKER)


def _describe_adaptor() -> str:
    """Import the adaptor, and say what it has done.

    Returns:
        The module and folder of the adaptor, and the number of names that it has patched.
    """
    adaptor = import_adaptor()
    names = importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager.patches_info
    spec = importlib.util.find_spec("mindspeed")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return f"{adaptor} ({', '.join(folders)}), {len(names)} names patched"


def _interfaces() -> Iterator[str]:
    """Yield the name of every network interface, with its IPv4 address if there is one."""
    for _, name in socket.if_nameindex():
        yield f"{name} {_address(name)}".strip()


def _address(interface: str) -> str:
    """Return the IPv4 address of an interface; empty if it has none, or if the system does not tell."""
    try:
        import fcntl
    except ImportError:
        return ""
    request = interface[:15].encode().ljust(256, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR of Linux
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _version(distribution: str) -> str:
    """Return the version of a distribution; empty if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
