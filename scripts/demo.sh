#!/usr/bin/env bash
# Sets up, trains a tiny model to add by GRPO (Ray, Megatron-core and vLLM on this CPU) and opens the report.
#   bash scripts/demo.sh --real    trains SmolLM2-135M-Instruct, a pretrained model, on sums and differences instead
# Further arguments go to the recipe: bash scripts/demo.sh --actor.tp 2
set -euo pipefail
cd "$(dirname "$0")/.."
recipe=(-m recipes.demos.cpu) run=runs/demo_cpu
if [ "${1:-}" = --real ]; then
  shift
  bash scripts/setup.sh reasoning
  export HF_HUB_OFFLINE=1
  .venv/bin/python -W ignore scripts/real_model.py smollm2 runs/models/smollm2
  # Three answered questions give answers a short form, and groups that agree, which teach nothing, are replaced.
  recipe=(-m recipes.reasoning_gym --model runs/models/smollm2 --shots 3 --shot-answer "= {answer}"
    --data.instruction "" --rollout.max-new-tokens 8 --rollout.max-num-seqs 256 --rollout.engines 2 --actor.share tree
    --steps 12 --eval-every 4 --prompts-per-step 64 --samples-per-prompt 8 --actor.optimizer.lr 2e-5
    --actor.optimizer.lr-scheduler cosine --actor.optimizer.lr-warmup-steps 2 --algorithm.mini-batches 4
    --algorithm.kl-coef 0.05 --algorithm.dynamic-sampling 2)
  run=runs/demo_real
else
  bash scripts/setup.sh
  export HF_HUB_OFFLINE=1
fi

case " $* " in
*" --run-dir"* | *" --help "* | *" -h "*) # the arguments say which folder, or none is needed
  exec .venv/bin/python -W ignore "${recipe[@]}" "$@" ;;
*" --resume "*)
  exec .venv/bin/python -W ignore "${recipe[@]}" --run-dir "$run" "$@" ;;
esac
base=$run n=1 # an earlier run keeps its folder; this one takes the next free
while [ -e "$run/config.json" ]; do
  run=$base.$n
  n=$((n + 1))
done
.venv/bin/python -W ignore "${recipe[@]}" --run-dir "$run" "$@"
if command -v chromium >/dev/null; then # a picture of the first screen, to show to others
  .venv/bin/python scripts/pages/shots.py "$run/report.html" --picture "$run/report.png" || true
fi
if [ -n "${DISPLAY:-}${WAYLAND_DISPLAY:-}" ]; then
  .venv/bin/python -m webbrowser "file://$PWD/$run/report.html" >/dev/null || true
fi
