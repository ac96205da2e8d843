"""What rank 0 of the launcher decides for all ranks of an attempt, and what it keeps beside the checkpoint for that."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vtp_plugin.checkpoint.save.saving import LOCK_VARIABLE, FolderLock, patience_s
from vtp_plugin.config import VtpConfig
from vtp_plugin.config.flag import format_value
from vtp_plugin.elastic.cards import Outcome, RankCard
from vtp_plugin.elastic.failed_cards import SILENT, UNTESTED, kind_of, leave_out, name_card
from vtp_plugin.elastic.progress import LastStep, read_last, write_last
from vtp_plugin.errors import LayoutError, VtpError
from vtp_plugin.host.versions import find_host
from vtp_plugin.runtime.health.redaction import Redaction
from vtp_plugin.tune.cluster.machines import Node
from vtp_plugin.tune.fit.constraints import Constraints
from vtp_plugin.tune.fit.fit_layout import (
    Chosen,
    assign_ranks,
    describe,
    fit,
    fitted_flags,
    in_order,
    layer_rule,
    read_constraints,
)
from vtp_plugin.util import log

_ALERT_S = 10.0


@dataclass(slots=True, kw_only=True)
class Coordinator:
    """Decides, on the launcher's rank 0, which ranks work and in which layout.

    Attributes:
        args: this rank's own flags.
        config: the plugin's options among them.
        folder: folder of checkpoints; None where nothing is kept.
        forgives: whether to forget which cards failed.
        on_loss: command that is run when cards are lost; empty for none.
        environment: variables of this process, with the launcher's.
        redaction: says what the other ranks may learn from this one.
        lines: reasons for the choice, as text; known once :meth:`decide` was called.
        lock: lock on the folder, once it is taken; it is held as long as this object lives.
    """

    args: Any
    config: VtpConfig
    folder: Path | None = None
    forgives: bool = False
    on_loss: str = ""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    redaction: Redaction = Redaction(is_one_site=True)
    lines: list[str] = field(default_factory=list[str])
    lock: FolderLock | None = None

    def decide(self, cards: Sequence[RankCard]) -> Outcome:
        """Fit the list to the cards of all ranks.

        Raises:
            ConfigError: nothing fits, ranks contradict each other, or another run has the folder.
        """
        last = self._take_folder()
        if self.folder is not None:
            launch = f"{socket.gethostname()} {os.getppid()}" if self.forgives else ""
            cards = leave_out(cards, self.folder, forgives=launch)
        try:
            outcome, self.lines = self._fit(cards, last)
        except VtpError as error:
            self._alert(str(error))
            raise
        if last is not None:
            self._alert(f"{last}; {self.lines[0]}")
            self.lines.append(str(last))
        if self.folder is not None:
            sizes = format_value(outcome.chosen.sizes)
            begin = LastStep(iteration=0, samples=0, at_s=time.time(), sizes=sizes)
            write_last(self.folder, begin if last is None else last.followed(sizes))
        return outcome

    def argv(self, chosen: Chosen, num_ranks: int) -> tuple[str, ...]:
        """Return the flags of the chosen list; each rank derives them from its own flags.

        Args:
            chosen: the list.
            num_ranks: number of ranks that work in the run.

        Raises:
            ConfigError: this rank's flags do not fit the list.
        """
        constraints = self._constraints()
        chosen.require(constraints, num_ranks)
        return fitted_flags(chosen, constraints, num_predicting=self.args.mtp_num_layers or 0)

    def close(self) -> None:
        """Release the folder for another run."""
        if self.lock is not None:
            self.lock.release()

    def _constraints(self) -> Constraints:
        """Read from this rank's own flags what a list must satisfy.

        Not before the card of this rank is posted: rank 0 would wait for one that a wrong flag has ended.
        """
        assert self.config.stages is not None
        return read_constraints(self.args, self.config, self.config.stages, layer_rule(find_host()[1].version))

    def _take_folder(self) -> LastStep | None:
        """Lock the folder, and read how far the last attempt came."""
        if self.folder is None:
            log.warning("no --save: failed devices, lost steps and errors that no restart cures are not remembered")
            return None
        limit_s = patience_s(self.config.timeout_s)
        self.lock = FolderLock(self.folder, self.environment, limit_s, token=self.environment.get(LOCK_VARIABLE))
        return read_last(self.folder)

    def _fit(self, cards: Sequence[RankCard], last: LastStep | None) -> tuple[Outcome, list[str]]:
        """Fit the list; return also why it is this one, as lines."""
        constraints = self._constraints()
        try:
            nodes, numbers = group_by_node(cards)
            in_order(nodes, constraints.sites)  # for its checks alone, which are about what ranks have posted
        except VtpError as error:
            # What another site posts may be wrong: it must not stop this one for good.
            error.is_final = error.is_final and self.redaction.trusts_coordinator
            raise
        bad = [f"excluded device: {name_card(card)} is {card.why}" for card in cards if card.why]
        try:
            layouts = fit(nodes, constraints)
        except VtpError as error:
            # A machine that was busy has its devices again after a restart.
            is_cured = any(kind_of(card.why) in (SILENT, *UNTESTED) for card in cards)
            error.is_final = error.is_final and not is_cured
            for line in bad:
                log.warning(line)
            raise
        best = layouts[0]
        layout = constraints.layout(best.sizes, best.num_replicas)
        assert layout is not None
        outcome = Outcome(
            seats=assign_ranks(best.node_names, layout, numbers),
            chosen=Chosen.of(best),
            why={number: self.redaction.reason(card.why) for number, card in enumerate(cards) if card.why},
            last=last,
        )
        return outcome, [*describe(layouts, constraints), *bad]

    def _alert(self, text: str) -> None:
        """Run the user's command; the run continues whether it succeeds or not."""
        if not self.on_loss:
            return
        try:
            done = subprocess.run(
                self.on_loss,
                shell=True,
                env={**os.environ, "VTP_LOSS": text},
                stdin=subprocess.DEVNULL,
                timeout=_ALERT_S,
                check=False,
            )
            problem = f"ended with status {done.returncode}" if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        if problem:
            log.warning(f"--vtp-on-loss {self.on_loss}: {problem}; the run continues")


def group_by_node(cards: Sequence[RankCard]) -> tuple[list[Node], dict[str, list[int]]]:
    """Group ranks by machine: the nodes, and for each node the ranks whose cards work, by local rank.

    Raises:
        ConfigError: versions or kinds of cards differ, or ranks of a machine contradict each other.
    """
    versions = {card.versions: card.node for card in cards}
    if len(versions) > 1:
        shown = " and ".join(f"{text} on {node}" for text, node in [*versions.items()][:2])
        raise LayoutError(f"versions differ between nodes: {shown}; install the same ones")
    nodes: list[Node] = []
    numbers: dict[str, list[int]] = {}
    for name in dict.fromkeys(card.node for card in cards):
        own = [(card.local_rank, number) for number, card in enumerate(cards) if card.node == name]
        if len({place for place, _ in own}) < len(own):
            raise LayoutError(f"two ranks on {name} have the same local rank; give each agent its own --vtp-node")
        sites = {card.site for card in cards if card.node == name}
        if len(sites) > 1:
            raise LayoutError(f"ranks on {name} name the sites {', '.join(sorted(sites))}; give one --vtp-site there")
        good = [number for _, number in sorted(own) if not cards[number].why]
        kinds = {cards[number].kind for number in good}
        if len(kinds) > 1:
            raise LayoutError(f"kinds of devices are mixed on {name}: {', '.join(sorted(kinds))}; give --vtp-device")
        nodes.append(Node(name=name, num_cards=len(good), site=sites.pop(), kind="".join(kinds)))
        numbers[name] = good
    return nodes, numbers
