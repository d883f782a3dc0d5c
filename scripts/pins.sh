#!/usr/bin/env bash
# Compiles requirements/requirements.in into the complete lists requirements/cpu.txt, cuda.txt and npu.txt.
#   bash scripts/pins.sh              all three
#   bash scripts/pins.sh cpu          one of them
#   bash scripts/pins.sh cpu -P ray   what follows goes to uv: here ray may move (-U: everything may)
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

profile=${1:-all}
case $profile in
  all)
    for each in cpu cuda npu; do bash "$0" $each; done
    ;;
  cpu)
    source=(--torch-backend cpu)
    [ -z "${PIP_FIND_LINKS:-}" ] || source=(--find-links "$PIP_FIND_LINKS")
    compile cpu x86_64-manylinux_2_31 "${source[@]}" "${@:2}"
    ;;
  cuda) compile cuda x86_64-manylinux_2_31 "${@:2}" ;;
  npu) compile npu aarch64-manylinux_2_34 "${@:2}" ;;
  *) fail "there is no profile $profile; give cpu, cuda or npu" ;;
esac
