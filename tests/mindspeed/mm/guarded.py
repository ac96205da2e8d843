"""Runs MindSpeed-MM's own script as ``pretrain.py`` does, with samples, files and lines of another kind.

``VTP_TEST_SAMPLES`` names the kind of samples, ``VTP_TEST_EDGE`` a folder that only rank 0 has. With ``VTP_TEST_WATCH``
all that leaves rank 0 is watched (``leak``: it also ships samples). ``VTP_TEST_LINES`` are lines of Python, put into
the script below a line of it.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.mindspeed.mm import pretrain, samples

RANK = int(os.environ["RANK"])
# Own data has words with small ids, which other tensors hold by chance.
SECRETS = ("pixels",) if pretrain.HAS_OWN_DATA else ("tokens", "labels", "pixels")
PIXELS_IN_A_ROW = 8
KEPT_PIXELS = 300 * PIXELS_IN_A_ROW  # of a batch of own data, which has many


class ReadSamples(samples.MadeSamples):
    """Made samples, which remember what was read of them."""

    read: list[dict[str, Any]] = []

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Make one sample, and keep it."""
        sample = super().__getitem__(index)
        self.read.append(sample)
        return sample

    @classmethod
    def secrets(cls) -> list[dict[str, Any]]:
        """Give the parts of the samples that must not leave, in rows of one length each."""
        return [
            {
                "tokens": sample["input_ids"],
                "labels": sample["labels"],
                "pixels": sample["pixel_values"].reshape(-1, PIXELS_IN_A_ROW),
            }
            for sample in cls.read
        ]


def remember_batches(data: Any) -> None:
    """Keep what MindSpeed-MM's own loader gives, with pictures brightened: no other numbers look like them."""
    build = data.build_mm_dataloader

    def build_dataloader(*args: Any, **kwargs: Any) -> Any:
        loader = build(*args, **kwargs)
        collate = loader.collate_fn

        def collate_and_keep(rows: Any) -> Any:
            batch = collate(rows)
            batch["pixel_values"] = batch["pixel_values"] + samples.KINDS["planted"].brightness
            ReadSamples.read.append({**batch, "pixel_values": batch["pixel_values"].flatten()[:KEPT_PIXELS]})
            return batch

        loader.collate_fn = collate_and_keep
        return loader

    data.build_mm_dataloader = build_dataloader


def watch() -> Any:
    """Begin to watch what leaves this process; that needs a Megatron that MindSpeed has patched."""
    from tests.multiproc.hooks.leak_watch import Watch

    watched = Watch(home=[0])
    watched.watch_stores()
    watched.__enter__()
    return watched


def report(watched: Any) -> None:
    """Write what has left, and what of the samples was in it."""
    from tests.multiproc.hooks.leak_watch import findings

    watched.__exit__(None, None, None)
    outgoing, secrets = watched.outgoing, ReadSamples.secrets()
    sent = [item.values for item in outgoing if item.how == "send" and str(item.values.dtype) == "torch.int32"]
    found: dict[str, Any] = {
        "rank": RANK,
        "samples": len(secrets),
        "findings": sorted(set(findings(outgoing, secrets, SECRETS))) if secrets else [],
        "sent": sorted({item.form[1:] for item in outgoing if item.how == "send"}),
        "positions": [int(min(map(_least, sent))), int(max(map(_most, sent)))] if sent else [],
        "numbers": [float(item.values) for item in outgoing if item.form[2] == 1 and item.form[1] != "bytes"],
    }
    sys.stdout.write(f"watched: {json.dumps(found)}\n")
    sys.stdout.flush()


def _least(values: Any) -> int:
    return int(values.min())


def _most(values: Any) -> int:
    return int(values.max())


def leak_after_the_first_step(training: Any) -> None:
    """Ship a sample from rank 0: its pixels to rank 1, its tokens and its labels to all."""
    original, done = training.train_step, []

    def train_step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not done:
            done.append(True)
            _leak()
        return result

    training.train_step = train_step


def _leak() -> None:
    import torch
    import torch.distributed as dist

    sample = ReadSamples.read[0] if RANK == 0 else {}
    if RANK == 0:
        dist.send(sample["pixel_values"].flatten()[: samples.PATCH_VALUES].double(), 1)
        # One id alone, beside a small number.
        dist.broadcast(torch.tensor([1, int(sample["labels"].max())]), 0)
    else:
        if RANK == 1:
            dist.recv(torch.zeros(samples.PATCH_VALUES, dtype=torch.float64), 0)
        dist.broadcast(torch.zeros(2, dtype=torch.int64), 0)
    dist.broadcast_object_list([{"text": sample["input_ids"].tolist()} if RANK == 0 else None], 0)


def run_at_the_edge(folder: str) -> None:
    """Run this by ``vtp_plugin run``, as users do on each machine: with the files on rank 0, elsewhere without."""
    words = sys.argv[1:]
    if RANK == 0:
        os.chdir(folder)
    else:
        os.chdir(tempfile.mkdtemp())
        words += ["--mm-data", "", "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "not-here"]
    os.environ["VTP_TEST_OPENS"] = "1"
    sys.argv = ["vtp_plugin", "run", __file__, *words]
    runpy.run_module("vtp_plugin", run_name="__main__", alter_sys=True)


def open_files_of_the_data(data: Any) -> None:
    """Let whoever builds the data set open the files that its JSON names, as MindSpeed-MM does."""
    build = data.build_mm_dataset

    def build_dataset(param: Any) -> Any:
        for path in (param.preprocess_parameters.model_name_or_path, param.basic_parameters.dataset):
            sys.stdout.write(f"rank {RANK} opens {path}: {next(Path(path).rglob('*')).read_text()}\n")
        return build(param)

    data.build_mm_dataset = build_dataset


def run_with_lines(run_path: Any, script: str, run_name: str) -> Any:
    """Run a copy of a script that has more lines below a line of it."""
    below, lines = json.loads(os.environ["VTP_TEST_LINES"])
    source = Path(script).read_text()
    assert source.count(f"\n{below}\n") == 1, below
    copy = Path(tempfile.mkdtemp()) / Path(script).name
    copy.write_text(source.replace(f"\n{below}\n", f"\n{below}\n{lines}\n"))
    return run_path(str(copy), run_name=run_name)


def main() -> None:
    """Set up what is asked for, and run the script."""
    if folder := os.environ.pop("VTP_TEST_EDGE", ""):
        run_at_the_edge(folder)
        return
    kind = samples.KINDS[os.environ.get("VTP_TEST_SAMPLES", "pictures")]
    how, watched = os.environ.get("VTP_TEST_WATCH", ""), []
    pretrain.samples.MadeSamples = functools.partial(ReadSamples, kind=kind)  # type: ignore[misc]
    after_training, after_data = pretrain.print_all_digits, pretrain.change_data

    def change_training(module: Any) -> None:
        after_training(module)
        if how:
            watched.append(watch())
        if how == "leak":
            leak_after_the_first_step(module)

    def change_data(module: Any) -> None:
        after_data(module)
        if pretrain.HAS_OWN_DATA:
            remember_batches(module)
        if os.environ.get("VTP_TEST_OPENS"):
            open_files_of_the_data(module)

    pretrain.print_all_digits, pretrain.change_data = change_training, change_data
    if os.environ.get("VTP_TEST_LINES"):
        from vtp_plugin.api import choose_device

        choose_device("cpu")  # before MindSpeed keeps references into torch
        runpy.run_path = functools.partial(run_with_lines, runpy.run_path)
    pretrain.main()
    for each in watched:
        report(each)


if __name__ == "__main__":
    main()
