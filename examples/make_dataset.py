"""Build a byte-level dataset in Megatron's indexed format from text that every machine has: Python's standard library.

    python examples/make_dataset.py out/demo/python_sources

writes ``out/demo/python_sources.bin`` and ``.idx``: one document per source file, one token per byte (0 to 255), byte 0
as end of document.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

END_OF_DOCUMENT = 0


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", type=Path, help="path of the dataset without its suffix")
    parser.add_argument("--max-bytes", type=int, default=8 << 20, help="stop after so much text (default 8 MiB)")
    options = parser.parse_args()
    for file in (f"{options.prefix}.bin", f"{options.prefix}.idx"):
        if Path(file).exists():
            sys.exit(f"{file} exists; nothing is overwritten; give another prefix, or remove it")
    num_documents, num_bytes = build(options.prefix, options.max_bytes)
    print(f"{options.prefix}.bin and .idx: {num_bytes:,} bytes of text in {num_documents} documents")


def build(prefix: Path, max_bytes: int) -> tuple[int, int]:
    """Write the dataset; sources come in alphabetical order.

    Args:
        prefix: path without suffix; its folder is made.
        max_bytes: limit on the text.

    Returns:
        Number of documents and of bytes.
    """
    import numpy  # here, since they take seconds
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    partial = f"{prefix}.partial"  # until it is whole, so that a run that was interrupted leaves no dataset
    builder = IndexedDatasetBuilder(f"{partial}.bin", dtype=numpy.uint16)
    num_documents = num_bytes = 0
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = source.read_bytes()
        if not text or num_bytes + len(text) > max_bytes:
            continue
        tokens = torch.tensor([*text, END_OF_DOCUMENT], dtype=torch.int64)
        builder.add_document(tokens, [len(tokens)])
        num_documents += 1
        num_bytes += len(text)
    builder.finalize(f"{partial}.idx")
    for suffix in (".bin", ".idx"):
        Path(partial + suffix).rename(f"{prefix}{suffix}")
    return num_documents, num_bytes


if __name__ == "__main__":
    main()
