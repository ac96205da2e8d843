#!/usr/bin/env bash
# The cloud: the layers in the middle; no tokenizer, no data. See edge.sh.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
SCRIPT="${SCRIPT:-$(dirname "$HERE")/pretrain_gpt.py}"
source "$HERE/shared.sh"

CLOUD_DIR="${CLOUD_DIR:-out/cloud}"
mkdir -p "$CLOUD_DIR"
cd "$CLOUD_DIR"

launch "${NODE_RANK:-1}" "${PROCESSES:-2}" cloud "$SCRIPT" "${SHARED[@]}" --save checkpoint --load checkpoint "$@"
