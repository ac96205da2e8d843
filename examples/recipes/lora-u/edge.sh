#!/usr/bin/env bash
# The edge: data, tokenizer, the first and the last layers, the loss. See shared.sh, which has the flags, and
# cloud.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/shared.sh"
FLAGS=("${MODEL[@]}" "${TRAINING[@]}" "${DEVICE[@]}" "${INPUT[@]}" "${SAVING[@]}" "$@")
source "$RECIPES/ask.sh"

launch 0 "${RANKS[0]}" edge "$SCRIPT" "${STAGES[@]}" "${FLAGS[@]}"
