#!/usr/bin/env bash
# Run a command beside busy processes, and end exactly those: scripts/busy.sh 20 .venv/bin/python -m pytest tests/hang
set -euo pipefail

if [[ $# -lt 2 || ! $1 =~ ^[0-9]+$ ]]; then
  echo "usage: $0 NUMBER COMMAND [ARGUMENT...]" >&2
  exit 2
fi
number=$1
shift

pids=()
end() { ((${#pids[@]} == 0)) || kill "${pids[@]}" 2>/dev/null || true; }
trap end EXIT
trap 'exit 130' INT TERM

for ((i = 0; i < number; i++)); do
  # Each looks after this script, so that it ends with it whatever happens.
  (
    trap - EXIT INT TERM
    while kill -0 $$ 2>/dev/null; do
      for ((j = 0; j < 10000; j++)); do :; done
    done
  ) &
  pids+=($!)
done

"$@"
