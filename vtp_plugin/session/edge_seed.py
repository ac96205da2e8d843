"""What the edge keeps: the seed of its layers, and whether its link is protected.

What the edge's own layers are drawn from, where the cloud is at another site: a key that only the edge's ranks have.

With one seed on both sites the cloud can draw the edge's layers itself, and find out which tokens give the activations
that it gets.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from vtp_plugin.checkpoint.save.atomic_dir import (
    EDGE_KEY,
    NEW_KEY_BYTES,
    read_edge_key,
    read_kept_key,
    require_same_key,
    write_edge_key,
)
from vtp_plugin.config import VtpConfig
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.link.guard import NCCL_BY_SOCKETS, check_device, check_way, spans_machines
from vtp_plugin.runtime.step.keyed_draws import KeyedDraws
from vtp_plugin.session.planned_run import PlannedRun
from vtp_plugin.util import log


@contextmanager
def protected_link(
    config: VtpConfig, device: str, environment: MutableMapping[str, str] = os.environ
) -> Iterator[None]:
    """Refuse what goes past an encrypted link between sites, and let NCCL go by sockets; afterwards it may choose.

    Nothing is done with one site, on one machine, or where ``--vtp-link-is-protected`` says that something else
    encrypts.

    Args:
        config: the plugin's options.
        device: ``cpu``, ``cuda`` or ``npu``.
        environment: variables of this process.

    Raises:
        ConfigError: the way is public, or the backend goes past it.
    """
    added: list[str] = []
    if config.has_several_sites and not config.link_is_protected:
        problems, warnings = check_way(environment)
        refuse(problems)
        if (problem := check_device(device, environment)) is not None:
            raise ConfigError(problem)
        for warning in warnings:
            if environment.get("LOCAL_RANK", "0") == "0":
                log.warning(warning)
        if device == "cuda" and spans_machines(environment):
            added = [name for name in NCCL_BY_SOCKETS if name not in environment]
            environment.update({name: NCCL_BY_SOCKETS[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            environment.pop(name, None)


_ROOT_BYTES = 32
_FLAG = "--vtp-edge-seed"


class EdgeSeed:
    """The key of the edge's layers on this rank, from its first rank to all others of the edge, and to the checkpoint.

    Attributes:
        root: what is drawn follows from these 32 bytes; None outside the edge, and where the edge has no key.
        has_drawn: whether weights were drawn from it.
    """

    def __init__(self) -> None:
        self.root: bytes | None = None
        self.has_drawn = False
        self._key: bytes | None = None
        self._is_drawing = self._is_given = False

    def find(self, planned: PlannedRun, rank: int, folders: Sequence[str | None] = ()) -> str | None:
        """Find or make the key, on the edge's first rank; others do nothing. A second call changes nothing.

        Args:
            planned: the run.
            rank: this rank.
            folders: where the run loads a checkpoint from; the first one that has a key gives it.

        Returns:
            One line for the log: what the edge's layers are drawn from; None on other ranks.

        Raises:
            ConfigError: a file does not hold a key, or others can read it.
        """
        config = planned.config
        if not config.has_own_edge or rank != planned.layout.leader(0):
            return None
        if config.edge_seed == "shared":
            return (
                f"the edge's layers are drawn from --seed ({_FLAG} shared): the cloud has it too, can draw the same "
                "layers, and read tokens from activations"
            )
        found = [Path(folder) for folder in folders if folder and (Path(folder) / EDGE_KEY).exists()]
        if config.edge_seed not in (None, "random"):
            self._key, source = read_edge_key(Path(config.edge_seed), _FLAG), f"the key in {config.edge_seed}"
            self._is_given = True
            for folder in found[:1]:
                require_same_key(self._key, f"{_FLAG} {config.edge_seed}", folder)
        elif found:
            self._key, source = read_kept_key(found[0], "--load"), f"the key in {found[0] / EDGE_KEY}"
        else:
            self._key, source = self._key or secrets.token_bytes(NEW_KEY_BYTES), "a new random key"
        return (
            f"the edge's layers are drawn from {source} ({_FLAG}), which only the edge's ranks get; it is kept beside "
            f"the edge's checkpoints as {EDGE_KEY}"
        )

    def share(self, planned: PlannedRun, stage_group: dist.ProcessGroup) -> None:
        """Give the key to all ranks of the edge, over a group of theirs alone; ranks of other stages do nothing.

        Args:
            planned: the run.
            stage_group: all ranks of this rank's stage, those of its replicas included.
        """
        if planned.own.stage != 0 or not planned.config.has_own_edge:
            return
        sent = torch.zeros(1 + _ROOT_BYTES, dtype=torch.uint8)
        if self._key is not None:
            root = hashlib.blake2b(self._key, digest_size=_ROOT_BYTES, person=b"vtp edge seed").digest()
            sent = torch.tensor([1, *root], dtype=torch.uint8)
        if dist.get_world_size(stage_group) > 1:
            sent = sent.to(planned.platform.device())
            dist.broadcast(sent, src=dist.get_process_group_ranks(stage_group)[0], group=stage_group)
        has_key, *root_bytes = sent.tolist()
        self.root = bytes(root_bytes) if has_key else None

    @contextmanager
    def drawing(self) -> Iterator[bool]:
        """Let what torch draws on this rank meanwhile follow from the key; do nothing where there is none.

        Yields:
            Whether this is the first time that there is a key.
        """
        if self.root is None or self._is_drawing:
            yield False
            return
        is_first, self.has_drawn, self._is_drawing = not self.has_drawn, True, True
        try:
            with KeyedDraws(self.root):
                yield is_first
        finally:
            self._is_drawing = False

    def keep(self, folder: Path) -> None:
        """Put the key into a folder of checkpoints, on the edge's first rank; others do nothing.

        Raises:
            OSError: it cannot be written.
        """
        if self._key is not None:
            write_edge_key(folder, self._key)

    def judge(self, folder: Path, *, has_key: bool) -> None:
        """Judge a checkpoint that the edge loads, on the edge's first rank; others do nothing.

        Args:
            folder: folder of checkpoints.
            has_key: whether the run that wrote it had a key for the edge.

        Raises:
            ConfigError: the key has been lost.
        """
        if self._key is None or (folder / EDGE_KEY).exists():
            return
        if has_key and not self._is_given:
            raise ConfigError(
                f"{folder} has no {EDGE_KEY}: the key from which the edge of this checkpoint was drawn is lost, and it "
                f"gives the masks of dropout, too; copy it there, or give a new one as {_FLAG} FILE"
            )
        if not has_key:
            log.warning(
                f"the edge's layers come from {folder}, and no key of the edge's is kept there: if these weights are "
                "published, or were drawn from a seed that the cloud has, it can have them too, and read tokens from "
                "activations"
            )

    def warn_of_other_weights(self) -> None:
        """Say once, on the edge's first rank, that a script has drawn the edge's weights from a seed of its own."""
        if self._key is None or self.has_drawn:
            return
        self.has_drawn = True
        log.warning(
            f"the edge's weights were not drawn from its key ({_FLAG}): a cloud that has the script's seed can draw "
            "them too; build the model inside `with vtp_plugin.drawing_edge_weights():`, or give edge_seed='shared'"
        )
