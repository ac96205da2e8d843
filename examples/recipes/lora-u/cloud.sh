#!/usr/bin/env bash
# The cloud: the layers in the middle; no data, no tokenizer. See shared.sh, which has the flags, and edge.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/shared.sh"

launch 1 "${RANKS[1]}" cloud "$SCRIPT" "${STAGES[@]}" "${MODEL[@]}" "${TRAINING[@]}" "${DEVICE[@]}" "${SAVING[@]}" "$@"
