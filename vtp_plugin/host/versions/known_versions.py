"""The families of Megatron versions, and what was run with which: data, and nothing else.

A new version has a row in ``HOSTS``. It has no capability until that was run with it; then that row says so.
"""

from __future__ import annotations

from vtp_plugin.host.versions.capability import Capability
from vtp_plugin.host.versions.megatron_family import MegatronFamily

HOSTS = (
    MegatronFamily(
        name="0.12",
        first="0.12.1",
        below="0.13",
        pythons=("3.10", "3.11"),
        torch="==2.7.1",
        needs_all=False,
    ),
    MegatronFamily(name="0.16", first="0.15", below="0.17", pythons=("3.11", "3.10", "3.12"), torch=">=2.6,<2.7"),
    MegatronFamily(name="0.17", first="0.17", below="0.18", pythons=("3.12", "3.13"), torch=">=2.6,<3"),
    MegatronFamily(name="0.18", first="0.18", below="0.19", pythons=("3.12", "3.13"), torch=">=2.6,<3"),
    MegatronFamily(name="0.19", first="0.19", below="0.20", pythons=("3.12", "3.13"), torch=">=2.6,<3"),
)
SUPPORTED = f">={HOSTS[0].first},<{HOSTS[-1].below}"
"""From the oldest version that is carried to the newest; not all between them are."""

_GRIDS = ("<0.17", ">=0.19,<0.20")
_NEWEST = (">=0.19,<0.20",)
_ALL = ("<0.20",)

CAPABILITIES = (
    Capability(
        name="core_grids",
        what="trains as the uniform run: the core grids",
        versions=_ALL,
        shown_by="tests/multiproc/layouts/test_host_grid.py",
    ),
    Capability(
        name="prediction",
        what="multi-token prediction",
        versions=_ALL,
        shown_by="tests/multiproc/training/test_mtp.py",
    ),
    Capability(
        name="scripts",
        what="a script on `megatron.training` trains",
        versions=("<0.17", ">=0.18,<0.20"),
        shown_by="tests/multiproc/training/test_training.py",
        notes={"<0.17": "NVIDIA's", ">=0.18,<0.19": "NVIDIA's"},
    ),
    Capability(
        name="fine_tuning",
        what="fine-tuning on packed samples (`--sft`)",
        versions=_NEWEST,
        shown_by="tests/multiproc/training/test_packed_training.py",
        absent=("<0.13",),
        notes={">=0.15,<0.17": "it ends in Megatron itself"},
        untried="--sft",
    ),
    Capability(
        name="hangs",
        what="ends when a rank hangs",
        versions=_GRIDS,
        shown_by="tests/hang/test_hangs.py",
        untried="hangs",
    ),
    Capability(
        name="whole_grids",
        what="the whole grids: schedules, options, saves, resumes, rejects wrong input",
        versions=("<0.12.3", ">=0.16,<0.17", ">=0.19,<0.20"),
        shown_by="make test-full",
        notes={"<0.17": "a part of `test_parity.py` only"},
        untried="the whole grids of options",
        untried_in_part="beyond the core grids",
    ),
    Capability(
        name="experts",
        what="experts per stage",
        versions=_GRIDS,
        shown_by="tests/multiproc/experts/test_experts.py",
        notes={">=0.17,<0.19": "not supported"},
    ),
    Capability(
        name="router_losses_per_token",
        what="its routers' losses with `--calculate-per-token-loss`",
        versions=_NEWEST,
        shown_by="tests/multiproc/experts/test_experts.py",
        notes={"<0.19": "not supported"},
    ),
    Capability(
        name="router_losses_over_contexts",
        what="its routers' losses where CP sizes differ, too",
        versions=(">=0.15,<0.17", ">=0.19,<0.20"),
        shown_by="tests/multiproc/experts/test_experts.py",
        notes={"<0.13": "not supported", ">=0.17,<0.19": "not supported"},
    ),
    Capability(
        name="latent_attention",
        what="latent attention",
        versions=_NEWEST,
        shown_by="tests/multiproc/training/test_attention.py",
        notes={"<0.19": "not supported"},
    ),
    Capability(
        name="layouts",
        what="`--pipeline-model-parallel-layout`",
        versions=(">=0.15",),
        shown_by="tests/multiproc/training/test_mtp.py",
        absent=("<0.15",),
    ),
    Capability(
        name="two_rings",
        what="an encoder in a U (`--vtp-encoder-layer-list`)",
        versions=_NEWEST,
        shown_by="tests/multiproc/u_shape/test_pictures.py",
        notes={"<0.19": "not supported"},
    ),
    Capability(
        name="bridges",
        what="bridges between modules (`--vtp-bridges`)",
        versions=_NEWEST,
        shown_by="tests/multiproc/bridges/test_bridges.py",
        absent=("<0.19",),
    ),
)
"""What was run with which versions, in the order of the README's table."""

FACTS = (
    Capability(
        name="named_aliases",
        what="records name, beside their targets, the places that hold these by a from-import",
        versions=_NEWEST,
        shown_by="tests/unit/session/test_apply.py",
    ),
    Capability(
        name="ramp_up",
        what="`--rampup-batch-size` makes batches grow",
        versions=("<0.18",),
        shown_by="tests/multiproc/training/test_growing_batches.py::test_batches_that_grow",
        notes={">=0.18": "ignored"},
    ),
    Capability(
        name="worker_without_cuda",
        what="the worker that saves in the background calls no CUDA",
        versions=(">=0.19",),
        shown_by="tests/unit/host/test_host_seam.py::test_the_worker_that_saves_is_refused_on_cpus",
    ),
    Capability(
        name="loss_summed_over_replicas",
        what="the loss function of its scripts sums every microbatch over the replicas of the stage",
        versions=("<0.13",),
        shown_by="tests/multiproc/layouts/test_joint_replicas.py",
    ),
)
"""What patches ask besides."""
