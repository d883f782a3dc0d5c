#!/usr/bin/env bash
# Packs what a machine without a network lacks of a list of pins, as slices with checksums.
#   bash scripts/bag/pack.sh LIST BAG --have HAVE --slice-mb 50 --arch 90
# LIST has lines NAME==VERSION, such as requirements/stacks/gpu-image.txt. HAVE is the output of "pip freeze" there.
# BAG is a new folder: slices, their checksums and unpack.sh, which unpacks them there. --help lists the options.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
PYTHONPATH=$root exec "$python" -m scripts.bag.pack "$@"
