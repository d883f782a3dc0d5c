#!/usr/bin/env bash
# Sets up, trains a tiny model to add by GRPO (Ray, Megatron-core and vLLM on this CPU) and opens the report.
#   bash scripts/demo.sh --real    trains SmolLM2-135M-Instruct, a pretrained model, on sums instead: 26 steps near the
#                                  model, then 14 more with less KL and without groups that agree
# Further arguments go to the recipe: bash scripts/demo.sh --actor.tp 2
set -euo pipefail
cd "$(dirname "$0")/.."
recipe=(-m recipes.demos.cpu) run=runs/demo_cpu goes_on=()
if [ "${1:-}" = --real ]; then
  shift
  bash scripts/setup.sh reasoning
  export HF_HUB_OFFLINE=1
  .venv/bin/python -W ignore scripts/real_model.py smollm2 runs/models/smollm2
  recipe=(-m recipes.reasoning_gym --model runs/models/smollm2 --steps 26 --data.instruction
    "Answer with the equation alone. If the second number is larger, the result is negative.") run=runs/demo_real
  goes_on=(--resume --steps 40 --algorithm.kl-coef 0.02 --algorithm.dynamic-sampling 3)
else
  bash scripts/setup.sh
  export HF_HUB_OFFLINE=1
fi

case " $* " in
*" --resume "* | *" --run-dir"* | *" --help "* | *" -h "*) # the arguments say which folder, or none is needed
  exec .venv/bin/python -W ignore "${recipe[@]}" "$@" ;;
esac
base=$run n=1 # an earlier run keeps its folder; this one takes the next free
while [ -e "$run/config.json" ]; do
  run=$base.$n
  n=$((n + 1))
done
.venv/bin/python -W ignore "${recipe[@]}" --run-dir "$run" "$@"
if [ ${#goes_on[@]} -gt 0 ]; then
  .venv/bin/python -W ignore "${recipe[@]}" "${goes_on[@]}" --run-dir "$run" "$@"
fi
if [ -n "${DISPLAY:-}${WAYLAND_DISPLAY:-}" ]; then
  .venv/bin/python -m webbrowser "file://$PWD/$run/report.html" >/dev/null || true
fi
