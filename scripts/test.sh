#!/usr/bin/env bash
# Sets up, checks the style and runs the tests. Arguments go to pytest: bash scripts/test.sh -k layout
#   bash scripts/test.sh --npu    engines and hardware under the npu profile's packages (docs/ascend.md)
#   bash scripts/test.sh --stack NAME [PART]...    ascend, gpu-image or now: with the versions of vLLM, torch and
#     transformers of requirements/stacks/ (docs/evidence.md). Without parts all of them run:
#     engines families hardware megatron digests grpo vlm killed
#   bash scripts/test.sh --processors    the numeric tests under kernels of other processors
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
if [ "${1:-}" = --npu ]; then
  bash scripts/setup.sh npu
  # CUDA's path is for another torch. A -k among the arguments takes the place of this one. By another -m than the
  # default run's these tests are not held to its budget of processes.
  exec .venv-npu/bin/python -m pytest -n 2 tests/engines/{batch,models,megatron} tests/hardware/{npu,megatron} \
    -m "not (large or product)" -k "not cuda" "${@:2}"
fi
if [ "${1:-}" = --stack ]; then
  stack=${2:-} && shift 2 || true
  case $stack in
    now) folder=.venv platform=cpu && bash scripts/setup.sh ;;
    ascend) folder=.venv-ascend platform=npu-emulated && bash scripts/setup.sh ascend ;;
    gpu-image) folder=.venv-gpu-image platform=cuda-emulated && bash scripts/setup.sh gpu-image ;;
    *) echo "test: there is no stack '$stack'; give ascend, gpu-image or now" >&2 && exit 1 ;;
  esac
  logs=runs/stacks/$stack failed=
  mkdir -p "$logs"
  run() { # NAME COMMAND...   goes on after a failure, and keeps the output
    local began=$SECONDS name=$1 state=ok
    "${@:2}" >"$logs/$name.log" 2>&1 || state=FAILED failed=1
    local counts
    counts=$(grep -oE '[0-9].* (passed|failed).* in ' "$logs/$name.log" | tail -1 || true)
    echo "$stack $name: $state, $((SECONDS - began)) s: ${counts:-$(grep -c ' ok ' "$logs/$name.log") lines ok}"
  }
  check() { run "$1" "$folder/bin/python" -m pytest --max-worker-restart 0 -p no:cacheprovider "${@:2}"; }
  families=(tests/engines/vllm/test_{text_families,vlm_rollout,video_rollout,states,tensor_parallel}.py)
  # CUDA's path needs a torch of 2.11 or later, and is not the Ascend profile's.
  others=() && [ $stack != ascend ] || others=(-k "not cuda")
  parts="engines families hardware megatron digests grpo vlm killed"
  [ $# -gt 0 ] || set -- $parts
  for part in "$@"; do
    case $part in
      engines) check engines -m "not product" tests/engines/vllm "${families[@]/#/--ignore=}" ;;
      families) check families -m "not product" "${families[@]}" ;;
      hardware) check hardware -m "not (large or product)" tests/hardware "${others[@]}" ;;
      megatron) check megatron -m "not (large or product)" tests/engines/{batch,models,megatron} "${others[@]}" ;;
      digests) # the weights that vLLM computes with, read back after a sync
        run digests "$folder/bin/python" -W ignore -m rlworker check --tiny qwen2 --platform $platform
        ;;
      grpo) check grpo -m "" tests/recipes/test_recipes.py -k "whole_and_small and grpo_gsm8k" ;;
      vlm) check vlm -m "" tests/recipes/test_recipes.py -k "whole_and_small and grpo_geo3k" ;;
      killed) check killed -m "not product" tests/rlworker/trainers/test_outages.py ;;
      *) echo "test: there is no part '$part'; give some of $parts" >&2 && exit 1 ;;
    esac
  done
  exit ${failed:-0}
fi
bash scripts/setup.sh
if [ "${1:-}" = --processors ]; then
  exec .venv/bin/python tests/support/suite/processors.py "${@:2}"
fi
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# A test that ends its process ends the run: pytest-xdist would wait for the rest of that process's tests for ever.
.venv/bin/python -m pytest -n 2 --max-worker-restart 0 "$@"
