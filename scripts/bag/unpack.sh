#!/usr/bin/env bash
# Checks the slices of a bag, joins them and unpacks the packages into a folder of their own. It needs Python alone.
#   bash BAG/unpack.sh FOLDER          then: PYTHONPATH=FOLDER python ...
#   bash BAG/unpack.sh FOLDER SLICES   slices that lie elsewhere than this script
# A folder may take several bags. PYTHON=python3.12 names the interpreter.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
[ $# -gt 0 ] || { echo "unpack: give the folder for the packages" >&2 && exit 1; }
exec "${PYTHON:-python3}" - "$here" "$1" "${2:-$here}" <<'PY'
import hashlib
import json
import sys
import tarfile
from pathlib import Path

bag, folder, slices = map(Path, sys.argv[1:])


class Joined:
    """The bytes of the slices, one after another, as a file to read; each is checked before a byte of it is given."""

    def __init__(self, expected):
        self.expected, self.rest = iter(expected.items()), memoryview(b"")

    def read(self, size):
        parts = []
        while size:
            if not self.rest:
                name, digest = next(self.expected, (None, None))
                if name is None:
                    break
                self.rest = memoryview(check(name, digest))
            parts.append(self.rest[:size])  # a view: a copy of what is left would take a minute in all
            self.rest = self.rest[size:]
            size -= len(parts[-1])
        return b"".join(parts)


def check(name, digest):
    data = (slices / name).read_bytes()
    if hashlib.sha256(data).hexdigest() != digest:
        sys.exit(f"unpack: {slices / name} has another checksum than when it was packed; carry it again")
    return data


manifest = json.loads((bag / "bag.json").read_text())
if missing := [name for name in manifest["slices"] if not (slices / name).is_file()]:
    sys.exit(f"unpack: {slices} lacks {', '.join(missing)}; carry them too")
version = ".".join(map(str, sys.version_info[:2]))
if version != manifest["python"]:
    sys.exit(f"unpack: the packages are for Python {manifest['python']}, and this is {version}; set PYTHON")
folder.mkdir(parents=True, exist_ok=True)
with tarfile.open(fileobj=Joined(manifest["slices"]), mode="r|xz") as archive:
    archive.extractall(folder, filter="tar")
print(f"unpack: {len(manifest['packages'])} packages in {folder}; use them by PYTHONPATH={folder.resolve()}")
PY
