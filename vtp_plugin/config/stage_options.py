"""Which ranks form which stage, and what each holds."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from vtp_plugin.config.declare_field import declare
from vtp_plugin.config.flag import FlagGroup, own, same
from vtp_plugin.config.parse_values import (
    DeviceName,
    format_value,
    parse_cp_list,
    parse_dp_list,
    parse_ep_list,
    parse_etp_list,
    parse_layer_list,
    parse_size_list,
    parse_stages,
)
from vtp_plugin.errors import LayoutError

option = functools.partial(declare, FlagGroup.WHERE)


@dataclass(frozen=True, kw_only=True)
class StageFields:
    """Options about ranks, stages, layers and devices."""

    size_list: tuple[int, ...] | Literal["auto"] | None = option(
        same("vtp_size_list", at_start=True),
        None,
        "tensor-parallel size of every pipeline stage, first stage first; or 'auto': node k of the launcher is stage "
        "k, or with --vtp-stages a layout that fits the devices that are there",
        "1,4,4",
        keyword="vtp_size_list",
        parse=parse_size_list,
    )
    stages: tuple[int, int] | None = option(
        same("vtp_stages", at_start=True, separator=":", none=""),
        None,
        "with '--vtp-size-list auto': the fewest and the most pipeline stages; TP sizes, layers and replicas are "
        "chosen for the devices that are there. --vtp-sites then names every site once, in the order of the pipeline",
        "MIN:MAX",
        parse=parse_stages,
    )
    cp_list: tuple[int, ...] | None = option(
        same("vtp_cp_list", at_start=True),
        None,
        "context-parallel size of every stage; default: --context-parallel-size on all",
        "1,2,2",
        keyword="vtp_cp_list",
        parse=parse_cp_list,
    )
    dp_list: tuple[int, ...] | None = option(
        same("vtp_dp_list", at_start=True),
        None,
        "data-parallel size (number of replicas) of every stage; default: one size for all, from the number of ranks",
        "1,2,2",
        keyword="vtp_dp_list",
        parse=parse_dp_list,
    )
    ep_list: tuple[int, ...] | None = option(
        same("vtp_ep_list", at_start=True),
        None,
        "expert-parallel size of every stage; default: --expert-model-parallel-size on all",
        "1,2,2",
        keyword="vtp_ep_list",
        parse=parse_ep_list,
    )
    etp_list: tuple[int, ...] | None = option(
        same("vtp_etp_list", at_start=True),
        None,
        "tensor-parallel size of the experts of every stage; default: --expert-tensor-parallel-size on all, or else "
        "each stage's own tensor-parallel size",
        "1,1,1",
        keyword="vtp_etp_list",
        parse=parse_etp_list,
    )
    data_parallel_size: int | None = option(
        own("the sizes that follow from it are compared, as vtp_dp_list"),
        None,
        "replicas of every stage; needed with '--vtp-size-list auto' only",
        "N",
        type=int,
    )
    device: DeviceName = option(
        own("the platform that is found is compared"),
        "auto",
        "device to train on, one kind for the whole run; auto (default) asks in this order: npu, cuda, cpu",
    )
    force: bool = option(same("forced"), False, "use the plugin for stages of one size too (for tests and benchmarks)")
    layerwise_disaggregated: bool = option(
        same("layerwise disaggregated"),
        False,
        "U-shaped pipeline: stage 0, the edge, holds the first and the last layers, with embedding, head, loss and "
        "data; give the layers by --num-layer-list, or by --pipeline-model-parallel-layout with one part more than "
        "stages",
        name="--layerwise-disaggregated-training",
    )
    num_layer_list: tuple[int, ...] | None = option(
        same("num_layer_list", none=""),
        None,
        "U-shaped pipeline: layers of the edge's first part, of every cloud stage, and of the edge's last part",
        "1,3,3,1",
        name="--num-layer-list",
        parse=parse_layer_list,
    )
    encoder_layer_list: tuple[int, ...] | None = option(
        same("vtp_encoder_layer_list", none=""),
        None,
        "U-shaped pipeline with an encoder whose middle layers are in the cloud, too: two rings. Layers of its first "
        "part on the edge, of its part on every cloud stage, and of its last part on the edge, which is where the "
        "first part of the language model is",
        "1,3,3,1",
        parse=functools.partial(parse_layer_list, flag="--vtp-encoder-layer-list"),
    )

    def check_stages(self) -> None:
        """Reject lists that do not fit each other."""
        if self.stages is not None and self.size_list != "auto":
            raise LayoutError(
                f"--vtp-stages {':'.join(map(str, self.stages))} needs --vtp-size-list auto; give both, or leave it out"
            )
        self._check_list("cp_list", self.cp_list, "context-parallel")
        self._check_list("dp_list", self.dp_list, "data-parallel")
        self._check_list("ep_list", self.ep_list, "expert-parallel")
        self._check_list("etp_list", self.etp_list, "expert tensor-parallel")
        if self.num_layer_list is not None and not self.layerwise_disaggregated:
            raise LayoutError("--num-layer-list is for --layerwise-disaggregated-training; give both or none")
        if self.encoder_layer_list is not None and not self.layerwise_disaggregated:
            raise LayoutError("--vtp-encoder-layer-list is for --layerwise-disaggregated-training; give both or none")
        if self.dp_list is not None and self.data_parallel_size is not None:
            raise LayoutError(
                f"data-parallel size {self.data_parallel_size} and vtp_dp_list {format_value(self.dp_list)} say the "
                "same thing twice; give one of them"
            )
        if self.data_parallel_size is not None and self.data_parallel_size < 1:
            raise LayoutError(f"data-parallel size {self.data_parallel_size} must be at least 1; leave it out for 1")

    def refuse_to_fit(self) -> None:
        """Reject a layout that is to be chosen once the script runs."""
        if self.stages is not None:
            raise LayoutError(
                "--vtp-stages in apply(); the layout must be chosen before the script starts, since that changes RANK, "
                "WORLD_SIZE and flags, which the script may have read; start with python -m vtp_plugin run, and leave "
                "--vtp-stages and 'auto' out of apply()"
            )

    def _check_list(self, name: str, sizes: tuple[int, ...] | None, what: str) -> None:
        if sizes is None:
            return
        shown = format_value(sizes)
        if self.size_list == "auto":
            raise LayoutError(f"vtp_{name} {shown} with vtp_size_list 'auto'; write the TP size of every stage instead")
        if isinstance(self.size_list, tuple) and len(sizes) != len(self.size_list):
            raise LayoutError(
                f"vtp_{name} {shown} has {len(sizes)} entries, the size list has {len(self.size_list)} stages; "
                f"give one {what} size per stage"
            )

    @property
    def num_rings(self) -> int:
        """How often a microbatch passes the cloud of a U-shaped pipeline; 0 for other pipelines."""
        return 0 if not self.layerwise_disaggregated else 1 if self.encoder_layer_list is None else 2

    @property
    def least_on_edge(self) -> int:
        """Least number of language layers of the edge's parts: in two rings they may be embedding and head alone."""
        return 0 if self.num_rings > 1 else 1

    @property
    def has_unequal_dp(self) -> bool:
        """Whether stages have different numbers of replicas."""
        return self.dp_list is not None and len(set(self.dp_list)) > 1
