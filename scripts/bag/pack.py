"""Pack what a machine without a network lacks of a list of pins, as slices with checksums.

    bash scripts/bag/pack.sh LIST BAG --have HAVE --slice-mb 50 --arch 90

The wheels are downloaded for the machine's Python and unpacked into one tree. Parts that nobody there needs are left
out, and GPU code of other architectures is zeroed. The tree is compressed by xz and cut into slices.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from scripts.bag.strip_gpu import strip

HERE = Path(__file__).parent
_MANYLINUX = ("2_17", "2_24", "2_26", "2_27", "2_28", "2_31", "2_34", "2_35")
"""Versions of glibc whose wheels the machine takes."""
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;#]+)")


def read_pins(text: str) -> dict[str, str]:
    """Read lines NAME==VERSION; other lines, such as comments and packages by a path, are left out."""
    pins = (_PIN.match(line.strip()) for line in text.splitlines())
    return {re.sub(r"[-_.]+", "-", pin[1]).lower(): pin[2] for pin in pins if pin}


def find_missing(wanted: Mapping[str, str], present: Mapping[str, str]) -> dict[str, str]:
    """Return the pins of packages that are not there. A package that is there in another version stays as it is."""
    return {name: version for name, version in wanted.items() if name not in present}


def download(pins: Mapping[str, str], folder: Path, python: str, machine: str) -> None:
    """Download the wheels of pins for another Python and machine."""
    platforms = [f"--platform=manylinux_{glibc}_{machine}" for glibc in _MANYLINUX]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--python-version", python, *platforms, f"--platform=manylinux2014_{machine}"]
    command += ["--dest", str(folder), *(f"{name}=={version}" for name, version in pins.items())]
    subprocess.run(command, check=True)


def unpack_wheel(wheel: Path, tree: Path, left_out: Sequence[str]) -> None:
    """Unpack a wheel as an installer does, but for its programs; modes of files are kept."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            data_folder, inside, rest = entry.filename.partition(".data/")
            name = entry.filename
            if inside and "/" not in data_folder:
                kind, _, name = rest.partition("/")
                if kind not in ("purelib", "platlib"):
                    continue
            if entry.is_dir() or any(fnmatch(name, pattern) for pattern in left_out):
                continue
            path = tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(entry))
            if mode := entry.external_attr >> 16 & 0o777:
                path.chmod(mode | 0o600)


def write_slices(tree: Path, bag: Path, slice_bytes: int) -> dict[str, str]:
    """Compress a tree and cut it into slices; returns name -> sha256 of each, in order."""
    # Sorted and without dates and owners, so that the same packages make the same bytes.
    tar = ["tar", "--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner", "-C", str(tree), "-c", "."]
    packing = subprocess.Popen(tar, stdout=subprocess.PIPE)
    squeezing = subprocess.Popen(["xz", "-6", "-T2"], stdin=packing.stdout, stdout=subprocess.PIPE)
    assert packing.stdout and squeezing.stdout
    packing.stdout.close()
    slices = {}
    while data := squeezing.stdout.read(slice_bytes):
        name = f"slice_{len(slices) + 1:03}"
        (bag / name).write_bytes(data)
        slices[name] = hashlib.sha256(data).hexdigest()
    if squeezing.wait() or packing.wait():
        sys.exit("pack: tar or xz failed (see above)")
    return slices


def read_patterns(paths: Iterable[Path]) -> list[str]:
    """Read patterns of files that are left out, one a line."""
    lines = (line.strip() for path in paths for line in path.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path, help="pins, one NAME==VERSION a line")
    parser.add_argument("bag", type=Path, help="new folder for the slices")
    parser.add_argument("--have", type=Path, help="packages of the machine, as pip freeze prints them")
    parser.add_argument("--only", nargs="*", default=(), help="packages of the list; without it all")
    parser.add_argument("--except", nargs="*", default=(), dest="without", help="packages that are left out")
    parser.add_argument("--python", default="3.12", help="version of the machine's Python")
    parser.add_argument("--machine", default="x86_64", help="processor of the machine")
    parser.add_argument("--slice-mb", type=float, default=50, help="most MB (10^6 bytes) of a slice")
    parser.add_argument("--arch", type=int, default=0, help="zero GPU code of other architectures, such as 90 for H100")
    parser.add_argument("--leave-out", type=Path, nargs="*", default=[HERE / "left_out.txt"], help="files of patterns")
    parser.add_argument("--wheels", type=Path, help="folder with the wheels; without it they are downloaded")
    return parser.parse_args()


def main() -> None:
    """Run the command line."""
    options = parse_arguments()
    if options.bag.exists():
        sys.exit(f"pack: {str(options.bag)!r} exists; name a new folder")
    wanted = read_pins(options.list.read_text())
    if unknown := sorted({*options.only, *options.without} - wanted.keys()):
        sys.exit(f"pack: {options.list} does not have {', '.join(unknown)}")
    present = read_pins(options.have.read_text()) if options.have else {}
    missing = find_missing(wanted, present)
    missing = {
        name: version
        for name, version in missing.items()
        if name not in options.without and (not options.only or name in options.only)
    }
    others = sorted(name for name in wanted.keys() & present.keys() if wanted[name] != present[name])
    with tempfile.TemporaryDirectory(dir=options.bag.parent) as scratch:
        wheels, tree = options.wheels or Path(scratch, "wheels"), Path(scratch, "tree")
        tree.mkdir()
        if not options.wheels:
            download(missing, wheels, options.python, options.machine)
        patterns = read_patterns(options.leave_out)
        for wheel in sorted(wheels.glob("*.whl")):
            unpack_wheel(wheel, tree, patterns)
        zeroed = sum(strip(path, options.arch) for path in sorted(tree.rglob("*.so*"))) if options.arch else 0
        options.bag.mkdir()
        slices = write_slices(tree, options.bag, int(options.slice_mb * 1e6))
        unpacked = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())
    sizes = {name: (options.bag / name).stat().st_size for name in slices}
    manifest = {"python": options.python, "arch": options.arch, "packages": missing, "slices": slices}
    (options.bag / "bag.json").write_text(json.dumps(manifest, indent=1) + "\n")
    shutil.copy(HERE / "unpack.sh", options.bag)
    print(f"pack: {len(missing)} packages, {unpacked / 1e6:.1f} MB, {zeroed / 1e6:.1f} MB of GPU code zeroed")
    for name in others:
        print(f"pack: the machine has {name} {present[name]}, and the list {wanted[name]}")
    print("pack:", ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items()))


if __name__ == "__main__":
    main()
