"""What differs between families of Megatron versions stands in one place, and names records that exist."""

from __future__ import annotations

import argparse
import re
import string
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.make_docs import former_ids
from vtp_plugin.config import VtpConfig
from vtp_plugin.config.resolve import option_context
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import Record, Writes, Written, declared
from vtp_plugin.host.rules.rule import EXPERT_RULES, LAYER_RULES, OptionContext
from vtp_plugin.host.versions import HOSTS, Package, host_named, is_in
from vtp_plugin.patches.core.transformer import multi_latent_attention
from vtp_plugin.patches.hosts import load_host
from vtp_plugin.patches.hosts.megatron_host import SeenDistributed, SeenTorch
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.patches.registry import declared_at, list_moments
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout

pytestmark = pytest.mark.needs("records_of_0_19")

NEWEST = HOSTS[-1].name
OLDER = [host.name for host in HOSTS[:-1]]


def records(name: str, *, is_u_shaped: bool = False, as_written: bool = False) -> dict[str, Record]:
    """Return the records of a family; as they are written, those that it does not need are among them."""
    host = load_host(name)
    config = VtpConfig(size_list=(1, 2), layerwise_disaggregated=is_u_shaped)
    always = (Moment.COMMAND_LINE, Moment.PLATFORM, Moment.CPU, Moment.STAGES)
    written = [record for moment in (*always, *list_moments(config)) for record in declared_at(moment, host)]
    found = written if as_written else host.placed(written)
    assert len({record.id for record in found}) == len(found)
    return {record.id: record for record in found}


def test_ids_say_what_records_are_and_former_ones_are_listed() -> None:
    """Logs of older runs name records by letters and numbers; docs/how/patches.md has both."""
    found = {record.id for host in HOSTS for moment in Moment for record in declared_at(moment, load_host(host.name))}
    word = "[a-z0-9]+(-[a-z0-9]+)*"
    assert [name for name in found if len(name) > 32 or not re.fullmatch(f"{word}(/{word})?", name)] == []
    former = former_ids()
    assert set(former) <= found and len(set(former.values())) == len(former) > 100


def context(layout: PipelineLayout) -> OptionContext:
    return option_context(VtpConfig(size_list=layout.tp_sizes), layout)


@pytest.mark.parametrize("name", [NEWEST, *OLDER])
def test_a_record_says_one_thing_of_every_family(name: str) -> None:
    """A range that ends too early, or too late, would leave a record without a target or with two."""
    for record in records(name, is_u_shaped=True, as_written=True).values():
        for found in (record.at(host.first) for host in HOSTS):
            assert found is None or re.fullmatch(r"(megatron|torch)\.[\w.]+:[\w.]+", found.target)
        assert not set(record.targets) & set(record.unneeded) and all(record.unneeded.values())


def test_a_megatron_that_cannot_be_imported_here_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.15 builds a CUDA library while it is imported."""
    monkeypatch.setattr("vtp_plugin.patches.hosts.find_megatron", lambda: Package("0.15.3", Path("core")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    with pytest.raises(ConfigError, match=r"megatron-core 0\.15\.3 at core builds a CUDA library"):
        load_host(NEWEST)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert load_host(NEWEST).name == NEWEST


@pytest.mark.parametrize("name", OLDER)
def test_records_lie_where_the_family_has_them(name: str) -> None:
    version, here, newest = load_host(name).version, records(name, is_u_shaped=True), records(NEWEST, is_u_shaped=True)
    for record_id, record in here.items():
        assert not record.aliases
        if record_id in newest and record_id != "p2p-communication" and not record.targets:
            assert record.target == newest[record_id].target
    written = records(name, is_u_shaped=True, as_written=True)
    found = {record_id: record.at(version) for record_id, record in written.items()}
    assert {name: record.target for name, record in found.items() if record} == {
        record_id: record.target for record_id, record in here.items()
    }
    unneeded = {record_id for record_id, record in written.items() if is_in(version, *record.unneeded)}
    assert unneeded == set(written) - set(here)
    assert set(newest) - set(here) <= unneeded


@pytest.mark.parametrize(
    ("record_id", "lies_in"),
    [
        (
            "padded-vocabulary",
            {"0.12": "training.tokenizer.tokenizer", "0.17": "core.tokenizers.utils.build_tokenizer"},
        ),
        ("router-loss-log", {"0.17": "core.transformer.moe.moe_utils", "0.18": "core.transformer.moe.moe_logging"}),
        ("batch-on-edge", {"0.12": None, "0.16": "training.utils", "0.17": "training.utils", "0.18": "core.utils"}),
        ("last-rank", {"0.16": "training.utils", "0.18": "training.utils.common_utils"}),
        ("last-stage", {"0.12": None, "0.16": "core.pipeline_parallel.utils"}),
        ("parallel-state/optimizer-group", {"0.12": None, "0.16": "core.parallel_state"}),
        ("parallel-state/egtp-group", {"0.18": None, "0.19": "core.parallel_state"}),
        ("parallel-state/world-size", {"0.18": "core.parallel_state", "0.19": None}),
        ("packed-length-stats", {"0.17": None, "0.18": "training.training"}),
        ("padded-vocabulary/builder", {"0.17": None, "0.18": "training.vocab_utils"}),
        ("empty-chunks", {"0.17": None, "0.18": "training.models.dist_utils"}),
        ("forked-save-worker", {"0.16": None, "0.17": "training.async_utils"}),
        ("latent-attention-grad", {"0.18": None, "0.19": "core.transformer.multi_latent_attention"}),
        ("latent-attention-grad/fused", {"0.18": None, "0.19": "core.transformer.multi_latent_attention"}),
        ("latent-attention-norm", {"0.18": None, "0.19": "core.transformer.multi_latent_attention"}),
        ("latent-attention-norm/fused", {"0.18": None, "0.19": "core.transformer.multi_latent_attention"}),
    ],
)
def test_what_families_have_elsewhere_or_not_at_all(record_id: str, lies_in: dict[str, str | None]) -> None:
    for name, module in lies_in.items():
        found = records(name, is_u_shaped=True).get(record_id)
        assert (found and found.module) == (module and f"megatron.{module}"), name


def test_a_write_lies_where_its_version_has_it() -> None:
    """It is declared once for all versions, and written through the record that is bound to a run."""
    moved = Written(
        id="W1",
        targets={"<0.17": "megatron.core:GONE", ">=0.17": "string:digits"},
        when=Moment.LIST,
        why="...",
        remove_when="never",
    )
    writes, here = Writes(), moved.at("0.18")
    assert here is not None
    bound = here.bound({"writes": writes})
    with writes[moved].during("01"):
        assert string.digits == "01" and bound.is_written
    assert string.digits == "0123456789" and bound.target == "string:digits"


@pytest.mark.parametrize("name", [host.name for host in HOSTS])
def test_the_worker_that_saves_is_refused_on_cpus(name: str) -> None:
    """That of 0.19 shares the tensors with the run, which goes on; it gets copies (`atomic-checkpoint/pieces`)."""
    args = argparse.Namespace(
        save="here",
        ckpt_format="torch",
        use_distributed_optimizer=False,
        async_save=True,
        use_persistent_ckpt_worker=True,
        async_strategy="mcore",
    )
    (*found,) = load_host(name).problems_of_saving(args, device="cpu")
    is_shared = is_in(host_named(name).first, ">=0.19")
    expected = [] if is_shared else ["--async-save with --use-persistent-ckpt-worker"]
    assert [line.partition(" on CPUs; ")[0] for line in found] == expected
    assert not tuple(load_host(name).problems_of_saving(args, device="cuda"))
    args.async_strategy = "nvrx"
    (line,) = load_host(name).problems_of_saving(args, device="cuda")
    assert line.startswith("--async-save with --async-strategy nvrx; ")


@pytest.mark.parametrize(
    ("name", "layers", "config", "words"),
    [
        ("0.12", None, {"num_layers": 3}, "give num_layer_list to apply"),
        ("0.12", (1, 1, 1), {"num_layers": 4}, "num_layers=4"),
        ("0.12", (1, 1, 1), {"num_layers": 3}, ""),
        (NEWEST, (1, 1, 1), {"pipeline_model_parallel_layout": None}, "has no pipeline_model_parallel_layout"),
        (NEWEST, (1, 1, 1), {"pipeline_model_parallel_layout": "Et|tt|L|"}, "set 'Et|t|tL|'"),
        (NEWEST, (1, 1, 1), {"pipeline_model_parallel_layout": "Et|t|tL|"}, ""),
        (NEWEST, None, {"pipeline_model_parallel_layout": "Et|t|tL|"}, ""),
    ],
)
def test_a_model_without_the_layers_of_its_u_is_refused(
    name: str, layers: tuple[int, ...] | None, config: dict[str, object], words: str
) -> None:
    text = config.get("pipeline_model_parallel_layout")
    if isinstance(text, str):
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

        config = {"pipeline_model_parallel_layout": PipelineParallelLayerLayout.from_str(text, 2)}
    host = load_host(name)
    problems = " | ".join(host.refusals(LAYER_RULES, host.u_layers(layers, SimpleNamespace(**config))))
    assert (words in problems) if words else not problems


@pytest.mark.parametrize("name", OLDER)
def test_latent_attention_is_refused_where_it_was_not_run(name: str) -> None:
    host = load_host(name)
    (record,) = host.placed(declared(multi_latent_attention))

    class Layer:
        config: object = None

        def __init__(self, config: object) -> None:
            self.config = config

    def build(layer: Layer, *, are_unequal: bool) -> None:
        session = SimpleNamespace(pipelines=SimpleNamespace(are_unequal=lambda: are_unequal))
        bound: Any = record.bound({"session": session, "host": host})
        bound.build(Layer.__init__)(layer, "a configuration")

    refused, built = (object.__new__(Layer) for _ in range(2))
    with pytest.raises(ConfigError, match=f"multi_latent_attention with Megatron {name}; "):
        build(refused, are_unequal=True)
    assert refused.config is None, "Megatron's constructor ran"
    build(built, are_unequal=False)
    assert built.config == "a configuration"


def test_megatron_sees_another_world_and_nothing_else() -> None:
    seen = SeenTorch(SeenDistributed(6))
    assert seen.distributed.get_world_size() == 6
    assert seen.distributed.new_group is torch.distributed.new_group
    assert (seen.cuda, seen.Tensor) == (torch.cuda, torch.Tensor)


@pytest.mark.parametrize("name", [NEWEST, *OLDER])
def test_experts_are_refused_where_they_were_not_run(name: str) -> None:
    host, unequal = load_host(name), PipelineLayout.from_sizes((1, 2), world_size=3)
    uniform, options = PipelineLayout.from_sizes((2, 2), world_size=4), argparse.Namespace(moe_aux_loss_coeff=0.1)
    assert not host.refusals(EXPERT_RULES, options, context(uniform))
    problems = host.refusals(EXPERT_RULES, options, context(unequal))
    assert len(problems) == (name in ("0.17", "0.18")) and all(f"Megatron {name};" in problem for problem in problems)


@pytest.mark.parametrize(
    ("name", "options", "is_refused"),
    [
        ("0.12", {"moe_aux_loss_coeff": 0.1}, True),
        ("0.16", {"moe_aux_loss_coeff": [0.0, 0.1]}, True),
        ("0.16", {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 1e-3}, True),
        ("0.12", {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}, False),
        ("0.16", {"moe_aux_loss_coeff": [0.0, 0.0]}, False),
        (NEWEST, {"moe_aux_loss_coeff": 0.1}, False),
    ],
)
def test_router_losses_per_token_are_refused_where_they_depend_on_sizes(
    name: str, options: dict[str, object], is_refused: bool
) -> None:
    host, args = load_host(name), argparse.Namespace(**options, calculate_per_token_loss=True)
    problems = host.refusals(EXPERT_RULES, args, context(PipelineLayout.from_sizes((1, 2), world_size=3)))
    assert [problem.partition(" with ")[0] for problem in problems] == ["--calculate-per-token-loss"] * is_refused
    replicas = PipelineLayout.from_sizes((1, 1), world_size=3, dp=(2, 1))
    assert not host.refusals(EXPERT_RULES, args, context(replicas))


@pytest.mark.parametrize("name", ["0.12", "0.16", NEWEST])
def test_router_losses_with_other_contexts_are_refused_with_0_12(name: str) -> None:
    layout = PipelineLayout.from_sizes((1, 1), world_size=3, cp=(1, 2))
    args = argparse.Namespace(moe_z_loss_coeff=1e-3, calculate_per_token_loss=False)
    problems = load_host(name).refusals(EXPERT_RULES, args, context(layout))
    assert len(problems) == (name == "0.12") and all("context-parallel sizes; Megatron 0.12" in x for x in problems)
