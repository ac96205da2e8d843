#!/usr/bin/env bash
# The cloud: vision and language layers in the middle; no data, tokenizer or processor. See edge.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/shared.sh"

launch "${NODE_RANK:-1}" "${PROCESSES:-8}" cloud "$SCRIPT" "${SHARED[@]}" --mm-data "" "$@"
