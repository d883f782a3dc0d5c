"""Zero the GPU code of shared libraries that one architecture does not run, so that they compress to a fraction.

Files keep their length and their symbols. NVIDIA's compiler puts GPU code into the sections ``.nv_fatbin`` and
``__nv_relfatbin`` of an ELF file, as a run of containers. A container begins with the magic number, a version, the size
of this header, and the size of what follows: entries of machine code (kind 2) or of PTX (kind 1), each for one
architecture. PTX is compiled by the driver when it is loaded, for its own architecture or a later one.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SECTIONS = (".nv_fatbin", "__nv_relfatbin")
_MAGIC = 0xBA55ED50
_PTX, _MACHINE_CODE = 1, 2


@dataclass(frozen=True)
class Entry:
    """GPU code for one architecture.

    Attributes:
        kind: PTX or machine code. arch: such as 90. start, size: place of the code in the file, in bytes.
    """

    kind: int
    arch: int
    start: int
    size: int


def list_sections(data: bytes) -> Iterator[tuple[str, int, int]]:
    """List name, offset and size of the sections of a 64-bit ELF file."""
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * entry_size) for i in range(count)]
    names = headers[names_index][4] if headers else 0
    for name, _, _, _, start, size, *_ in headers:
        text = data[names + name : data.index(b"\0", names + name)]
        yield text.decode(), start, size


def list_containers(data: bytes) -> Iterator[list[Entry]]:
    """List the entries of each container of a file."""
    for name, start, size in list_sections(data):
        place = start
        while name in _SECTIONS and place + 16 <= start + size:
            magic, _, header, length = struct.unpack_from("<IHHQ", data, place)
            if magic != _MAGIC:  # padding
                place += 8
                continue
            end, place = place + header + length, place + header
            entries = []
            while place < end:
                kind, _, header = struct.unpack_from("<HHI", data, place)
                (code,) = struct.unpack_from("<Q", data, place + 8)
                (arch,) = struct.unpack_from("<I", data, place + 28)
                entries.append(Entry(kind, arch, place + header, code))
                place += header + code
            yield entries


def choose(entries: list[Entry], arch: int) -> list[Entry]:
    """Choose the entries that an architecture runs: its machine code, or without any the newest PTX it can compile."""
    own = [entry for entry in entries if entry.kind == _MACHINE_CODE and entry.arch == arch]
    if own:
        return own
    newest = max((entry.arch for entry in entries if entry.kind == _PTX and entry.arch <= arch), default=None)
    return [entry for entry in entries if entry.kind == _PTX and entry.arch == newest]


def strip(path: Path, arch: int) -> int:
    """Zero the GPU code of a library that ``arch`` does not run; returns the number of zeroed bytes.

    A library is left as it is if it has none that ``arch`` runs.
    """
    data = bytearray(path.read_bytes())
    if data[:5] != b"\x7fELF\x02":
        return 0
    containers = list(list_containers(bytes(data)))
    if not any(choose(entries, arch) for entries in containers):
        return 0
    zeroed = 0
    for entries in containers:
        kept = choose(entries, arch)
        for entry in entries:
            if entry not in kept:
                data[entry.start : entry.start + entry.size] = bytes(entry.size)
                zeroed += entry.size
    if zeroed:
        path.write_bytes(data)
    return zeroed
