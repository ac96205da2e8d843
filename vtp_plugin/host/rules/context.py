"""What the table and the checks know about a run besides Megatron's arguments."""

from __future__ import annotations

from dataclasses import dataclass

from vtp_plugin.host.versions import family_of


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionContext:
    """The run that Megatron's options are checked against.

    Attributes:
        tp_sizes: Tensor-parallel size of every stage, in pipeline order, all positive; empty before there are stages.
        cp_sizes: Context-parallel size of every stage; empty for 1 on all stages.
        dp_sizes: Data-parallel size of every stage; empty for one size on all stages.
        ep_sizes: Expert-parallel size of every stage; empty for 1 on all stages.
        etp_sizes: Tensor-parallel size of the experts of every stage; empty for the stages' own ``tp_sizes``.
        is_split: Replicas of stages with unequal data-parallel sizes share microbatches (``--vtp-dp-mode split``).
        forced: The plugin's groups and communicator are used even for a uniform list.
        is_planned: The plugin's executor runs the steps, not Megatron's schedules.
        has_split_backward: Gradients of weights are computed later than those of inputs (``--vtp-split-backward``).
        is_u_shaped: The first stage holds both ends of the model.
        num_rings: How often a microbatch passes the cloud of a U; 0 without one.
        device: The platform: ``"cuda"``, ``"npu"`` or ``"cpu"``, or ``"auto"`` while it is not known.
        version: Version of the Megatron that runs; empty if none does, as for plans on a laptop.
    """

    tp_sizes: tuple[int, ...]
    cp_sizes: tuple[int, ...] = ()
    dp_sizes: tuple[int, ...] = ()
    ep_sizes: tuple[int, ...] = ()
    etp_sizes: tuple[int, ...] = ()
    is_split: bool = False
    forced: bool = False
    is_planned: bool = False
    has_split_backward: bool = False
    is_u_shaped: bool = False
    num_rings: int = 0
    device: str = "auto"
    version: str = ""

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.tp_sizes)

    @property
    def megatron(self) -> str:
        """The family of the Megatron that runs.

        >>> OptionContext(tp_sizes=(1, 2), version="0.15.3").megatron
        '0.16'
        """
        family = family_of(self.version) if self.version else None
        return self.version if family is None else family.name

    @property
    def is_uniform(self) -> bool:
        """Whether all stages have the same sizes."""
        lists = (self.tp_sizes, self.cp_sizes, self.dp_sizes, self.ep_sizes, self.etp_sizes)
        return all(len(set(sizes)) <= 1 for sizes in lists)

    @property
    def has_unequal_cp(self) -> bool:
        """Whether the stages have different context-parallel sizes."""
        return len(set(self.cp_sizes)) > 1

    @property
    def has_unequal_dp(self) -> bool:
        """Whether the stages have different data-parallel sizes."""
        return len(set(self.dp_sizes)) > 1

    @property
    def size_list(self) -> str:
        """The lists of sizes as flags; those of equal cp, dp or ep sizes are left out.

        >>> OptionContext(tp_sizes=(1, 4, 4)).size_list
        '--vtp-size-list 1,4,4'
        >>> OptionContext(tp_sizes=(1, 1), cp_sizes=(1, 2)).size_list
        '--vtp-size-list 1,1 --vtp-cp-list 1,2'
        """
        lists = [("--vtp-size-list", self.tp_sizes)]
        lists += [("--vtp-cp-list", self.cp_sizes)] if self.has_unequal_cp else []
        lists += [("--vtp-dp-list", self.dp_sizes)] if self.has_unequal_dp else []
        lists += [("--vtp-ep-list", self.ep_sizes)] if len(set(self.ep_sizes)) > 1 else []
        return " ".join(f"{flag} {','.join(map(str, sizes))}" for flag, sizes in lists)
