"""The table: which Megatron options work with stages of different sizes, which are refused, and why.

The rows of each subject are in a file of their own, ``rows_*.py``. Here they are joined, in the order of the document.
Each row was decided by reading Megatron (0.19.2), and a supported one by a test as well:

* An option that derives everything from this rank's groups is supported, and names the test that shows it.
* An option that no test here can run, because it needs CUDA or a package that is not installed, is supported only if it
  touches no group, or only groups inside a stage or of the whole world. Its evidence is ``not run: ...``.
* Everything else is refused: a refusal is better than a run that may hang, or be wrong without an error.
"""

from __future__ import annotations

from vtp_plugin.host.rules.table.rows_architecture import ARCHITECTURE_RULES
from vtp_plugin.host.rules.table.rows_checkpoint import CHECKPOINT_RULES
from vtp_plugin.host.rules.table.rows_data import DATA_RULES
from vtp_plugin.host.rules.table.rows_data_parallel import DATA_PARALLEL_RULES
from vtp_plugin.host.rules.table.rows_kernels import KERNEL_RULES
from vtp_plugin.host.rules.table.rows_model import MODEL_RULES
from vtp_plugin.host.rules.table.rows_moe import MOE_RULES
from vtp_plugin.host.rules.table.rows_parallelism import ORDER_RULES, PARALLELISM_RULES
from vtp_plugin.host.rules.table.rows_split import SPLIT_CONFIG_RULES, SPLIT_RULES
from vtp_plugin.host.rules.table.rows_training import TRAINING_RULES
from vtp_plugin.host.rules.table.rule import OptionRule, case, on, refused_planned, refused_unequal

RULES: tuple[OptionRule, ...] = (
    *PARALLELISM_RULES,
    *MODEL_RULES,
    *MOE_RULES,
    *ARCHITECTURE_RULES,
    *KERNEL_RULES,
    *DATA_PARALLEL_RULES,
    *TRAINING_RULES,
    *CHECKPOINT_RULES,
    *DATA_RULES,
    *ORDER_RULES,
    *SPLIT_RULES,
)
"""The table, by subject. Attributes name Megatron's parsed arguments. The first row that refuses an option counts."""

CONFIG_RULES: tuple[OptionRule, ...] = (
    *refused_unequal(
        "its gradients are summed over the pipeline group, which hangs between stages of different sizes",
        case("config.has_cond_embedder", on, "has_cond_embedder"),
        case("config.flextron", on, "flextron"),
        way_out="switch it off or give every stage the same size",
    ),
    *refused_planned(
        "only Megatron's schedules do this, the plugin's executor does not",
        "config.num_microbatches_with_partial_activation_checkpoints",
        "config.overlap_moe_expert_parallel_comm",
        "config.moe_paged_stash",
        "config.defer_embedding_wgrad_compute",
        "config.fine_grained_activation_offloading",
        "config.hybrid_context_parallel",
        "config.cuda_graph_impl local",
    ),
    *SPLIT_CONFIG_RULES,
)
"""Fields of the model's configuration: some have no flag, others are set by a script without a command line."""

STEP_RULES: tuple[OptionRule, ...] = refused_planned(
    "the plugin's executor uses the plugin's channels and shapes", "p2p_communicator", "adjust_tensor_shapes_fn"
)
"""Arguments of Megatron's function that runs a step."""
