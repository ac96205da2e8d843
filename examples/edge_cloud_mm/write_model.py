"""Write another JSON of a MindSpeed-MM model, with the layers of every stage and chunk.

    python examples/edge_cloud_mm/write_model.py model_32b.json --output model.json \
        --vision "[[3,7,7,7,7],[1,0,0,0,0],[0,0,0,0,0]]" --text "[[0,0,0,0,0],[0,16,16,16,16],[0,0,0,0,0]]"
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main() -> None:
    """Read, change two entries, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="JSON file of MindSpeed-MM")
    parser.add_argument("--vision", type=json.loads, required=True, help="layers of the vision encoder: a row a chunk")
    parser.add_argument("--text", type=json.loads, required=True, help="layers of the language model, likewise")
    parser.add_argument("--output", type=Path, required=True, help="where to")
    asked = parser.parse_args()
    if asked.output.exists():
        sys.exit(f"{asked.output} exists; nothing is overwritten; give another --output, or remove it")
    model = json.loads(asked.model.read_text())
    model["image_encoder"]["vision_encoder"]["pipeline_num_layers"] = asked.vision
    model["text_decoder"]["pipeline_num_layers"] = asked.text
    asked.output.write_text(json.dumps(model, indent=4) + "\n")


if __name__ == "__main__":
    main()
