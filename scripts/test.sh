#!/usr/bin/env bash
# Sets up, checks the style and runs the tests. Arguments go to pytest: bash scripts/test.sh -k layout
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/python -m pytest -n 2 "$@"
