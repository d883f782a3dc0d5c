#!/usr/bin/env bash
# The first day of a card: installs, checks the device and a real model, trains in several ways, and writes one JSON.
#   bash scripts/gpu_day.sh                               on NVIDIA's card: SmolLM2-135M, bf16, one device
#   bash scripts/gpu_day.sh --devices 8 --json day.json   with nccl between devices
#   bash scripts/gpu_day.sh --platform cuda-emulated --model tiny    the same programs on any machine
# Further arguments go to recipes.common.first_day (--help lists them). Please send the JSON to the project.
set -euo pipefail
cd "$(dirname "$0")/.."

platform=cuda model=smollm2 rest=()
while [ $# -gt 0 ]; do
  case $1 in
    --platform) platform=$2 && shift 2 ;;
    --model) model=$2 && shift 2 ;;
    *) rest+=("$1") && shift ;;
  esac
done
case $platform in
  cuda) profile=cuda folder=.venv-cuda ;;
  npu) profile=npu-device folder=.venv-npu-device ;;
  *) profile=cpu folder=.venv ;;
esac
start=$SECONDS
bash scripts/setup.sh $profile
installed=$profile:$((SECONDS - start))
export HF_HUB_OFFLINE=1
case $model in
  tiny) model= ;;
  smollm2)
    model=runs/models/smollm2
    $folder/bin/python -W ignore scripts/real_model.py smollm2 $model
    ;;
esac
exec $folder/bin/python -W ignore -m recipes.common.first_day --platform "$platform" --model "$model" \
  --installed "$installed" "${rest[@]}"
