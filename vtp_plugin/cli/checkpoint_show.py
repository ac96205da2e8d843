"""What ``checkpoint show`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vtp_plugin.checkpoint.format.contents import Contents, kind_of
from vtp_plugin.checkpoint.format.map_file import MAP
from vtp_plugin.checkpoint.format.optimizer_formats import (
    BY_BLOCK,
    BY_BUCKET,
    BY_BUCKET_OLDER,
    BY_RANK,
    IN_MODEL_SPACE,
    PLAIN,
)
from vtp_plugin.checkpoint.tools.reshardable import note_of_experts
from vtp_plugin.cli.boundaries import format_bytes

_SIZES = {
    "tp": ("vtp_size_list", "tensor_model_parallel_size"),
    "cp": ("vtp_cp_list", "context_parallel_size"),
    "dp": ("vtp_dp_list", "data_parallel_size"),
    "ep": ("vtp_ep_list", "expert_model_parallel_size"),
    "etp": ("vtp_etp_list", "expert_tensor_parallel_size"),
}
_MOVES = {
    IN_MODEL_SPACE: "any layout loads it",
    BY_BLOCK: "any layout of Megatron 0.12 to 0.15 loads it",
    BY_RANK: "only the layout that wrote it loads it; checkpoint reshard converts it for others",
    PLAIN: "any layout loads it",
}


def facts_of(contents: Contents) -> dict[str, Any]:
    """Return what there is to show, as JSON can hold it."""
    index = contents.index
    files = {extent.file for _, extent in index.extents()}
    return {
        "folder": str(contents.folder),
        "iteration": contents.common.get("iteration"),
        "format": "torch_dist",
        "num_files": len(files),
        "num_bytes": index.num_bytes,
        "form": contents.form,
        "has_map": contents.has_map,
        "experts": note_of_experts(contents),
        "steps": contents.steps() if contents.form is not None else [],
        "sizes": _sizes(contents.arguments),
        "tensors": [
            {
                "key": key,
                "state": kind_of(key),
                "dtype": tensor.dtype,
                "shape": list(tensor.flattened or tensor.shape),
                "num_pieces": len(tensor.extents),
                "num_bytes": sum(extent.length or 0 for _, extent in tensor.extents),
            }
            for key, tensor in index.tensors.items()
        ],
    }


def _sizes(arguments: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the sizes of every stage, as far as the arguments say them; the last three only with more than one."""
    num_stages = arguments.get("pipeline_model_parallel_size") or 1
    found: dict[str, list[int]] = {}
    for name, (by_stage, of_all) in _SIZES.items():
        values = arguments.get(by_stage) or ([arguments[of_all]] * num_stages if arguments.get(of_all) else None)
        if values is not None:
            found[name] = list(values)
    return found


def lines_of(facts: Mapping[str, Any], *, is_verbose: bool) -> Iterator[str]:
    """Write what there is to show."""
    yield f"{facts['folder']}: iteration {facts['iteration']}, {facts['format']}"
    yield f"{format_bytes(facts['num_bytes'])} in {facts['num_files']} files"
    if sizes := facts["sizes"]:
        yield "saved with " + ", ".join(f"{name} {','.join(map(str, values))}" for name, values in sizes.items())
    yield from _of_optimizer(facts)
    states = dict.fromkeys(each["state"] for each in facts["tensors"])
    for state in states:
        tensors = [each for each in facts["tensors"] if each["state"] == state]
        dtypes = ", ".join(dict.fromkeys(each["dtype"] for each in tensors))
        size = format_bytes(sum(each["num_bytes"] for each in tensors))
        yield f"{state}: {len(tensors)} tensors, {dtypes}, {sum(each['num_pieces'] for each in tensors)} pieces, {size}"
        for each in tensors if is_verbose else ():
            shown = f"{each['dtype']} {each['shape']}, {each['num_pieces']} pieces, {format_bytes(each['num_bytes'])}"
            yield f"  {each['key']}: {shown}"


def _of_optimizer(facts: Mapping[str, Any]) -> Iterator[str]:
    form = facts["form"]
    if form is None:
        yield "no optimizer"
        return
    moves = _MOVES.get(form, "unknown to this version")
    if form in (BY_BUCKET, BY_BUCKET_OLDER):
        moves = (
            f"with {MAP}: any layout loads it"
            if facts["has_map"]
            else f"without {MAP}: any layout loads it if where its parameters lie can be worked out"
        )
    steps = ", ".join(f"{step:g}" for step in facts["steps"]) or "unknown"
    yield f"optimizer {form}, {moves}; steps {steps}"
    if facts["experts"]:
        yield facts["experts"]
