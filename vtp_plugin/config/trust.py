"""What the sites of a run may learn of each other, and what is written down of it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from vtp_plugin.config.declare_field import declare
from vtp_plugin.config.flag import FlagGroup, own, same
from vtp_plugin.config.parse_values import parse_sites

option = functools.partial(declare, FlagGroup.TRUST)


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Options about a run over several sites."""

    sites: tuple[str, ...] | None = option(
        same("sites", at_start=True, none=""),
        None,
        "site of every stage; default: all in one",
        "edge,cloud,cloud",
        parse=parse_sites,
    )
    share_errors: bool = option(
        own("each site decides for itself"),
        False,
        "several sites: let the other sites read the texts of this rank's errors and the values of its arguments; "
        "without it they read the type of an error and where it happened. Each site decides for itself",
    )
    edge_seed: str | None = option(
        own("only the edge draws from it", is_path=True),
        None,
        "U of two sites: what the edge's own layers are drawn from (embedding, its layers, head). random (default): a "
        "key of 256 bits, which only the edge's ranks get, and which is kept beside its checkpoints; shared: --seed, "
        "which the cloud has too, so it can draw these layers and read tokens from activations; FILE: a key of your "
        "own, of 16 bytes or more, in a file of mode 0600, so that a run can be repeated",
        "random|shared|FILE",
    )
    audit: str | None = option(
        own("each machine has its own files", is_path=True),
        None,
        "record every message between stages, one JSON object a line; rank 3 writes FILE with .rank3 before its "
        "suffix; sites may differ",
        "FILE",
    )

    link_is_protected: bool = option(
        same("vtp_link_is_protected", at_start=True),
        False,
        "several sites on several machines: something that the plugin does not see, such as IPsec or MACsec, encrypts "
        "all ways between them, those of InfiniBand and of the devices' own ports too. Without it a public address on "
        "an interface that is no VPN is rejected, NCCL goes by sockets, and HCCL is not supported",
    )

    @property
    def has_several_sites(self) -> bool:
        """Whether stages are at different sites."""
        return len(set(self.sites or ())) > 1
