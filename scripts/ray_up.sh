#!/usr/bin/env bash
# Starts this machine's part of a Ray cluster, for runs over more than one process tree or more than one machine.
#   bash scripts/ray_up.sh head                       on the first machine; prints what the others are to run
#   bash scripts/ray_up.sh worker HEAD_ADDRESS:6379   on every other machine
#   bash scripts/ray_up.sh down                       ends this machine's part of the cluster of PORT, and no other Ray
# then, on the first machine:  RAY_ADDRESS=auto python -m recipes.NAME ...
#
#   DEVICES=N     accelerators to offer; left out, as many as Ray finds
#   CPUS=N        cores to offer, one for each process of a run; left out, as many as there are
#   PORT=6379     of the head
#   RAY_AUTH_MODE=disabled   lets everybody in who reaches the port
# Settings for the engines (HCCL_*, NCCL_*, *_VISIBLE_DEVICES) are to be exported before this, on every machine: processes
# that Ray starts get the environment of `ray start`.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  echo "ray_up: $*" >&2
  exit 1
}

# `ray stop` ends whatever Ray runs here; ours have the port of their cluster in their environment.
signal_part() {
  local found=1 environment process
  for environment in /proc/[0-9]*/environ; do
    process=${environment#/proc/}
    if grep -qzx "RLWORKER_RAY_UP=$port" "$environment" 2>/dev/null; then
      kill -"$1" "${process%/environ}" 2>/dev/null && found=0
    fi
  done
  return $found
}

ray=.venv/bin/ray
[ -x "$ray" ] || ray=$(command -v ray) || fail "no ray; run scripts/setup.sh, or install the profile under requirements/ that fits"
port=${PORT:-6379}

# Ray finds a machine's devices by itself, and of them those that *_VISIBLE_DEVICES leaves visible.
resources=()
if [ -n "${DEVICES:-}" ]; then
  if compgen -G '/dev/davinci[0-9]*' >/dev/null; then
    resources=(--resources "{\"NPU\": $DEVICES}")
  elif command -v nvidia-smi >/dev/null; then
    resources=(--num-gpus "$DEVICES")
  else
    fail "DEVICES=$DEVICES was asked for, and this machine has neither /dev/davinci* nor nvidia-smi"
  fi
fi

[ -z "${CPUS:-}" ] || resources+=(--num-cpus "$CPUS")

# A cluster answers those who have its token, which a head makes where it has none.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
case "${1:-}" in
head)
  [ "$RAY_AUTH_MODE" != token ] || "$ray" get-auth-token --generate >/dev/null 2>&1 || fail "ray made no token for its cluster"
  RLWORKER_RAY_UP=$port "$ray" start --head --port "$port" --include-dashboard false "${resources[@]}"
  echo "ray_up: on every other machine, with a copy of this one's ~/.ray/auth_token: bash scripts/ray_up.sh worker $(hostname -I | cut -d' ' -f1):$port"
  ;;
worker)
  [ -n "${2:-}" ] || fail "worker needs the head's address: bash $0 worker HEAD_ADDRESS:$port"
  RLWORKER_RAY_UP=${2##*:} "$ray" start --address "$2" "${resources[@]}"
  ;;
down)
  signal_part TERM || fail "no Ray that this script has started for port $port runs here; set PORT to the head's"
  for _ in $(seq 50); do
    sleep 0.2
    signal_part 0 || exit 0
  done
  signal_part KILL || true
  ;;
*)
  fail "expected head, worker ADDRESS or down; see the top of $0"
  ;;
esac
