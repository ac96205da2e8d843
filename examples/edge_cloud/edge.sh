#!/usr/bin/env bash
# The edge: first and last layers, tokenizer, data, loss. Start it on one machine and cloud.sh on another (or in another
# terminal); docs/guides/edge-cloud.md says how. Arguments of Megatron for this site alone may follow.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
SCRIPT="${SCRIPT:-$(dirname "$HERE")/pretrain_gpt.py}"
source "$HERE/shared.sh"

EDGE_DIR="${EDGE_DIR:-out/edge}"
mkdir -p "$EDGE_DIR"
cd "$EDGE_DIR"
[ -e data/text.idx ] || "$PYTHON" "$(dirname "$HERE")/make_dataset.py" data/text --max-bytes 1000000

launch 0 "${PROCESSES:-1}" edge "$SCRIPT" "${SHARED[@]}" \
    --data-path data/text --split 80,10,10 --tokenizer-type NullTokenizer --vocab-size 256 --num-workers 0 \
    --save checkpoint --load checkpoint --tensorboard-dir tensorboard --vtp-audit audit.jsonl "$@"
