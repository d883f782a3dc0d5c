#!/usr/bin/env bash
# The first day of a card: installs, checks the device and a real model, trains in several ways, and writes one JSON.
#   bash scripts/gpu_day.sh                               on NVIDIA's card: SmolLM2-135M, bf16, one device
#   bash scripts/gpu_day.sh --devices 8 --json day.json   with nccl between devices
#   bash scripts/gpu_day.sh --platform cuda-emulated --model tiny    the same programs on any machine
#   bash scripts/gpu_day.sh --packages FOLDER --minutes 8 --only "device check"    with what bag/unpack.sh unpacked
# A further call goes on behind the lines that are there. Further arguments go to recipes.common.first_day (--help lists
# them). Please send the JSON to the project.
set -euo pipefail
cd "$(dirname "$0")/.."

platform=cuda model=smollm2 packages= rest=()
while [ $# -gt 0 ]; do
  case $1 in
    --platform) platform=$2 && shift 2 ;;
    --model) model=$2 && shift 2 ;;
    --packages) packages=$(cd "$2" && pwd) && shift 2 ;;
    *) rest+=("$1") && shift ;;
  esac
done
export HF_HUB_OFFLINE=1
if [ -n "$packages" ]; then # in place of an installation, beside the packages that the machine has
  python=${PYTHON:-python3}
  export PYTHONPATH=$packages:$PWD${PYTHONPATH:+:$PYTHONPATH}
else
  case $platform in
    cuda) profile=cuda folder=.venv-cuda ;;
    npu) profile=npu-device folder=.venv-npu-device ;;
    *) profile=cpu folder=.venv ;;
  esac
  start=$SECONDS
  bash scripts/setup.sh $profile
  rest+=(--installed "$profile:$((SECONDS - start))")
  python=$folder/bin/python
fi
case $model in
  tiny) model= ;;
  smollm2)
    model=runs/models/smollm2
    "$python" -W ignore scripts/real_model.py smollm2 $model
    ;;
esac
exec "$python" -W ignore -m recipes.common.first_day --platform "$platform" --model "$model" "${rest[@]}"
