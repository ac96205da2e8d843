"""What a checkout of Sailor's artifact says of cards, links and a model, in the words of ``search``.

Read, and never written: `Planner/simulations/profiles_tmp.json` (seconds of each layer, by kind of card, microbatch
size and tensor-parallel size), `Planner/llm_info.json` (weights and activations of each layer),
`Planner/simulations/configs` (the model, the cards of a node) and `providers` (bandwidths by kind of card and size of a
message).

Their first "layer" is the embedding, their last one the head; between them are the layers of the model. Their times
have the sums between tensor-parallel ranks in them: so here these cost nothing more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from vtp_plugin.cli import search
from vtp_plugin.cli.command_base import Parser
from vtp_plugin.cli.search_request import SearchRequest, read_request
from vtp_plugin.tune.cluster.machines import Card, Cluster, Links, Nodes, Time
from vtp_plugin.tune.cluster.read_cluster import HeldBytes, HeldPart
from vtp_plugin.tune.cluster.speed import Link
from vtp_plugin.tune.search.problem import BatchSplit

KINDS = ("A100-40", "V100-16")
MICRO_SIZES = (1, 2, 4, 8)
# Messages that lines are fitted to, in bytes: activations cut into four, up to gradients of the whole model.
_MESSAGES = tuple(2**power * 1e6 for power in range(1, 9))
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """What was read.

    Attributes:
        training: Sailor's configuration of the run.
        profiles: times of the model: by kind of card, microbatch size, tensor-parallel size and layer, forward,
            backward and update.
        layers: memory of the model: by tensor-parallel size and layer, what it holds.
        nodes: number of cards of a node, by kind of card.
        between: link between two nodes, by kind and number of senders, kind and number of receivers: a polynomial.
        zone: zone of all nodes.
    """

    training: dict[str, Any]
    profiles: dict[str, Any]
    layers: dict[str, Any]
    nodes: dict[str, int]
    between: dict[str, Any]
    zone: str

    @property
    def num_layers(self) -> int:
        """Layers as they count them, both ends of the model among them."""
        return int(self.training["num_all_layers"])


def read_artifact(root: Path) -> Artifact:
    """Read a checkout."""
    planner, providers = root / "sailor/Planner", root / "sailor/providers"
    configs = planner / "simulations/configs"
    training = _json(configs / "training_config_opt_350.json")
    cluster, zones = _json(configs / "basic_cluster_config.json"), _json(providers / "multizone_bandwidths_het.json")
    zone = cluster["zone"]
    between = {
        kind: {number: rows[zone] for number, rows in zones[zone][kind].items()}
        for kind in KINDS
        if kind in zones[zone]
    }
    return Artifact(
        training=training,
        profiles=_json(planner / "simulations/profiles_tmp.json")[training["model"]],
        layers=_json(planner / "llm_info.json")[training["model"]],
        nodes={kind: int(cluster[kind]["gpus_per_node"]) for kind in KINDS},
        between=between,
        zone=zone,
    )


def _json(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


def message_s(polynomial: Sequence[float], num_bytes: float) -> float:
    """Say how long a message takes: they fit GB/s by a polynomial in the binary logarithm of its megabytes.

    >>> message_s([1.0, 2.0], 4e6) == 4e6 / 4e9
    True
    """
    rate = 0.0
    for coefficient in polynomial:
        rate = rate * math.log2(num_bytes / 1e6) + coefficient
    return num_bytes / 1e9 / rate


def fit_link(polynomial: Sequence[float], at_once: int | None = None) -> Link:
    """Fit a latency and a bandwidth: the least squares of relative errors.

    >>> link = fit_link([2.0])
    >>> abs(link.latency_s) < 1e-9, round(link.bytes_per_s / 1e9, 6)
    (True, 2.0)
    """
    # For each message 1 = latency / t + bytes / t * (1 / bandwidth).
    times = [message_s(polynomial, size) for size in _MESSAGES]
    ones, sizes = [1 / time for time in times], [size / time for size, time in zip(_MESSAGES, times, strict=True)]
    aa, ab, bb = (
        sum(x * y for x, y in zip(*pair, strict=True)) for pair in ((ones, ones), (ones, sizes), (sizes,) * 2)
    )
    determinant = aa * bb - ab * ab
    latency = max(0.0, (sum(ones) * bb - sum(sizes) * ab) / determinant)
    return Link(latency_s=latency, bytes_per_s=bb / (sum(sizes) - latency * ab), at_once=at_once)


def read_cluster(artifact: Artifact, counts: Sequence[int]) -> Cluster:
    """Give so many cards of each kind, in nodes as theirs."""
    cards = {kind: _card(artifact, kind) for kind in KINDS}
    nodes = tuple(
        Nodes(name=kind, card=cards[kind], num_nodes=count // size, num_cards=size, site="")
        for kind, count in zip(KINDS, counts, strict=True)
        if (size := artifact.nodes[kind]) and count
    )
    free = {number: Link() for number in range(2, max(artifact.nodes.values()) + 1)}
    between = {kind: _between(artifact, kind) for kind in KINDS}
    links = Links(
        # Their simulator sends all messages from node to node; sums inside a node are in the times of layers.
        inside=between,
        between=between,
        sums=dict.fromkeys(KINDS, free),
    )
    return Cluster(nodes=nodes, links=links)


def _between(artifact: Artifact, kind: str) -> Link:
    rates = artifact.between[kind]
    most = artifact.nodes[kind]
    one, all_at_once = (rates[str(number)][kind][str(number)][0] for number in (1, most))
    # Activations go over several links at once; one of a sample says how many of them count.
    sample = 4.0 * artifact.training["sequence_length"] * artifact.training["hidden_size"]
    return fit_link(one, at_once=min(most, round(message_s(one, sample) / message_s(all_at_once, sample))))


def _card(artifact: Artifact, kind: str) -> Card:
    rows = artifact.profiles[kind]
    last = artifact.num_layers - 1
    times: list[Time] = []
    for size in MICRO_SIZES:
        for tp, layers in rows.get(str(size), {}).items():
            parts = {"embedding": [layers["0"]], "head": [layers[str(last)]]}
            parts["dense"] = [layers[str(layer)] for layer in range(1, last)]
            times += [_time(artifact, part, int(tp), size, own) for part, own in parts.items()]
    numel = sum(layer["params_floats"] for layer in artifact.layers["1"].values())
    update = rows["1"]["1"]["0"][2] / numel * 1e6
    times.append(replace(times[0], part="update", forward_s=update, backward_s=0.0))
    return Card(
        name=kind,
        memory_bytes=int(kind.rpartition("-")[2]) * _GIB,
        times=tuple(times),
    )


def _time(artifact: Artifact, part: Any, tp: int, size: int, layers: Sequence[Sequence[float]]) -> Time:
    return Time(
        part=part,
        tp=tp,
        micro_batch_size=size,
        seq_length=artifact.training["sequence_length"],
        forward_s=mean(layer[0] for layer in layers),
        backward_s=mean(layer[1] for layer in layers),
    )


def held_bytes(artifact: Artifact, micro_batch_size: int) -> HeldBytes:
    """Say what a rank holds by their rule: 24 bytes of a weight with Adam, activations in fp32, and 2 or 3 GB."""
    of_weight = 20 if artifact.training["optimizer"] == "sgd" else 24
    last = artifact.num_layers - 1
    sums: dict[int, list[tuple[int, int]]] = {}
    for tp, layers in artifact.layers.items():
        state = kept = 0
        rows = sums[int(tp)] = [(0, 0)]
        for layer in range(last + 1):
            state += of_weight * layers[str(layer)]["params_floats"]
            kept += 4 * micro_batch_size * layers[str(layer)]["act_mem_floats"]
            rows.append((state, kept))

    def held(part: HeldPart) -> int:
        tp, _, start, end, is_first, is_last, in_flight, _ = part
        (state, kept), (before, not_kept) = sums[tp][end + 1 + is_last], sums[tp][start + 1 - is_first]
        return state - before + (kept - not_kept) * in_flight + (2 if tp == 1 else 3) * 10**9

    return held


def ask(artifact: Artifact, cluster: Cluster) -> SearchRequest:
    """Ask what ``search`` would be asked, with their rule of memory, and only of sizes that they profiled."""
    training = artifact.training
    words = {
        "--num-layers": training["num_layers"],
        "--hidden-size": training["hidden_size"],
        "--num-attention-heads": training["heads"],
        "--seq-length": training["sequence_length"],
        "--max-position-embeddings": training["max_position_embeddings"],
        "--vocab-size": training["vocab_size"],
        "--global-batch-size": training["global_batch_size"],
        "--micro-batch-size": MICRO_SIZES[0],
        "--micro-batch-sizes": ",".join(map(str, MICRO_SIZES)),
    }
    flat = [word for flag, value in words.items() for word in (flag, str(value))]
    parser = Parser(add_help=False)
    search.add_arguments(parser)
    # The cluster is known already.
    args, args.unknown = parser.parse_known_args([*flat, "--untie-embeddings-and-output-weights", "--cluster", "none"])
    request = read_request(args, cluster)
    splits = tuple(_of_theirs(artifact, split) for split in request.problem.splits)
    return replace(request, problem=replace(request.problem, splits=splits))


def _of_theirs(artifact: Artifact, split: BatchSplit) -> BatchSplit:
    size = split.micro_batch_size
    pools = []
    for pool in split.pools:
        timed = artifact.profiles[pool.name].get(str(size), {})
        pools.append(replace(pool, speeds={tp: speed for tp, speed in pool.speeds.items() if str(tp) in timed}))
    return replace(split, pools=tuple(pools), held_bytes=held_bytes(artifact, size))
