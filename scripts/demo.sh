#!/usr/bin/env bash
# Sets up, trains a tiny model to add by GRPO (Ray, Megatron-core and vLLM on this CPU) and opens the report.
# Arguments go to the recipe: bash scripts/demo.sh --actor.tp 2
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
export HF_HUB_OFFLINE=1

run=runs/demo_cpu
case " $* " in
*" --resume "* | *" --run-dir"* | *" --help "* | *" -h "*) # the arguments say which folder, or none is needed
  exec .venv/bin/python -W ignore -m recipes.demos.cpu "$@" ;;
esac
n=1 # an earlier run keeps its folder; this one takes the next free
while [ -e "$run/config.json" ]; do
  run=runs/demo_cpu.$n
  n=$((n + 1))
done
.venv/bin/python -W ignore -m recipes.demos.cpu --run-dir "$run" "$@"
if [ -n "${DISPLAY:-}${WAYLAND_DISPLAY:-}" ]; then
  .venv/bin/python -m webbrowser "file://$PWD/$run/report.html" >/dev/null || true
fi
