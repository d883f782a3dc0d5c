#!/usr/bin/env bash
# Makes .venv with the pinned cpu profile and this project in it. Run it as often as you like: it does nothing twice.
#   PYTHON=python3.11        the interpreter to use
#   PIP_FIND_LINKS=FOLDER    where the CPU wheel of torch lies; without it uv takes it from PyTorch's CPU index
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  echo "setup: $*" >&2
  exit 1
}

python=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}
[ -n "$python" ] || fail "no python3 on the PATH; install Python 3.11 or name it: PYTHON=/path/to/python3.11 bash $0"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' ||
  fail "$python is $("$python" -V 2>&1); Python 3.11 or newer is needed: PYTHON=/path/to/python3.11 bash $0"

stamp=$(cat requirements/cpu.txt pyproject.toml requirements/rlworker_torchvision.py | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/.installed 2>/dev/null || true)" = "$stamp" ]; then
  exit 0
fi

echo "setup: installing the cpu profile into .venv"
if [ -e .venv ] && [ ! -e .venv/.rlworker ]; then
  fail ".venv exists and was not made by this script; move it away (mv .venv .venv.mine) and run this again"
fi
mkdir -p .venv && touch .venv/.rlworker
"$python" -m venv .venv || fail "could not make .venv with $python; on Debian install python3-venv"
venv=.venv/bin/python
if "$venv" -m pip install --quiet --disable-pip-version-check uv; then
  source=(--torch-backend cpu)
  [ -z "${PIP_FIND_LINKS:-}" ] || source=(--find-links "$PIP_FIND_LINKS")
  install() { "$venv" -m uv pip install --quiet --compile-bytecode --python "$venv" --no-deps "${source[@]}" "$@"; }
else
  echo "setup: uv is not to be had, using pip (slower)"
  install() { "$venv" -m pip install --quiet --disable-pip-version-check --no-deps "$@"; }
fi
install -r requirements/cpu.txt ||
  fail "installing failed (see above). Is the package index reachable? Where torch 2.13.0+cpu was not found, download its \
wheel and name the folder: PIP_FIND_LINKS=FOLDER bash $0"
packages=$("$venv" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp requirements/rlworker_torchvision.py "$packages" && echo "import rlworker_torchvision" >"$packages/rlworker_torchvision.pth"
install --no-build-isolation -e . || fail "installing this project failed (see above)"

"$venv" -W ignore - <<'PY' || fail "a component does not import (see above); remove .venv and run this again"
import importlib, logging, os, sys

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")
logging.disable(logging.WARNING)
import torch

if torch.version.cuda:
    sys.exit(f"torch {torch.__version__} is a CUDA build; the cpu profile needs 2.13.0+cpu (set PIP_FIND_LINKS)")
for name in ("torch", "torchvision", "ray", "transformers", "vllm", "megatron.core", "tyro", "plotly", "rlworker"):
    module = importlib.import_module(name)
    version = getattr(module, "__version__", None) or importlib.metadata.version(name)
    print(f"  {name:14} {version}")
PY
echo "$stamp" >.venv/.installed
echo "setup: done"
