#!/usr/bin/env bash
# Sets up, trains a tiny model to add by GRPO (Ray, Megatron-core and vLLM on this CPU) and opens the report.
# Arguments go to the recipe: bash scripts/demo.sh --actor.tp 2
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
export HF_HUB_OFFLINE=1

run=runs/demo_cpu
if [ -e "$run/config.json" ]; then # an earlier run is kept under the next free number
  n=1
  while [ -e "$run.$n" ]; do n=$((n + 1)); done
  mv "$run" "$run.$n"
  echo "demo: the earlier run is now $run.$n"
fi
.venv/bin/python -W ignore -m recipes.demo_cpu --run-dir "$run" "$@"
if [ -n "${DISPLAY:-}${WAYLAND_DISPLAY:-}" ] || [ "$(uname)" = Darwin ]; then
  .venv/bin/python -m webbrowser "file://$PWD/$run/report.html" >/dev/null || true
fi
