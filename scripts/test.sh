#!/usr/bin/env bash
# Sets up, checks the style and runs the tests. Arguments go to pytest: bash scripts/test.sh -k layout
#   bash scripts/test.sh --npu    engines and hardware under the npu profile's packages (docs/ascend.md)
#   bash scripts/test.sh --stack NAME [PART]...    ascend, gpu-image or now: with the versions of vLLM, torch and
#     transformers of requirements/stacks/ (docs/evidence.md). Parts: engines hardware megatron runs; all take an hour.
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
bash scripts/setup.sh
if [ "${1:-}" = --processors ]; then
  exec .venv/bin/python tests/support/suite/processors.py "${@:2}"
fi
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# A test that ends its process ends the run: pytest-xdist would wait for the rest of that process's tests for ever.
.venv/bin/python -m pytest -n 2 --max-worker-restart 0 "$@"
