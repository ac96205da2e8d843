#!/usr/bin/env bash
# The edge: pictures, texts and labels, tokenizer and processor; the first and the last vision layers, the projector, the
# embedding, the head and the loss. Start it on one machine and cloud.sh on the others; docs/guides/mindspeed-mm.md says how.
# Arguments for this site alone may follow.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/shared.sh"

launch 0 "${PROCESSES:-2}" edge "$SCRIPT" "${SHARED[@]}" \
    --mm-data "${DATA:-examples/qwen2.5vl/data_32b.json}" --num-workers "${WORKERS:-8}" "$@"
