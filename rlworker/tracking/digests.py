"""Digests of a checkpoint's files, by which damage is noticed before anything is read from them.

``digests.txt`` has a line for each file: its digest, its size in bytes, and its path in the checkpoint. The last line
is that of the file itself, over the lines above it.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

DIGESTS = "digests.txt"
"""File of a checkpoint that has the digests of the others."""
_READ_BYTES = 4 * 2**20
_THREADS = 8
"""Files that are read at a time: a disk of several, or a network's, serves one reader at a fraction of its rate."""
_NAMED = 5
"""Damaged files of a checkpoint that a message names."""


@dataclass(frozen=True)
class FileDigest:
    """A file's contents, in short.

    Attributes:
        size: bytes. digest: xxh3 of 128 bits over them, as hexadecimal digits.
    """

    size: int
    digest: str


DigestFiles = Callable[[Path, list[str]], Mapping[str, FileDigest]]
"""``digest_files(folder, names)`` -> the digests by name."""


def digest_text(text: str) -> FileDigest:
    """Digest a file of this text."""
    data = text.encode()
    return FileDigest(len(data), xxhash.xxh3_128_hexdigest(data))


def digest_file(path: Path) -> FileDigest:
    """Digest a file, some megabytes of it in memory at a time. Raises OSError, with its path, if it cannot be read."""
    state, size, room = xxhash.xxh3_128(), 0, memoryview(bytearray(_READ_BYTES))
    try:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(room):
                state.update(room[:count])
                size += count
    except OSError as error:  # that of a read says nothing of the file
        raise OSError(error.errno, error.strerror, str(path)) from error
    return FileDigest(size, state.hexdigest())


def digest_files(folder: Path | str, names: Iterable[str]) -> dict[str, FileDigest]:
    """Digest files of a folder, several at a time; returned by their names."""
    names = list(names)
    with ThreadPoolExecutor(min(_THREADS, max(1, len(names)))) as pool:
        return dict(zip(names, pool.map(lambda name: digest_file(Path(folder) / name), names), strict=True))


def list_files(folder: Path) -> set[str]:
    """List the files of a folder and the folders in it, by their paths from it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def format_digests(digests: Mapping[str, FileDigest]) -> str:
    """Write the digests of a checkpoint as the text of its ``digests.txt``."""
    lines = "".join(_format_line(name, digests[name]) for name in sorted(digests))
    return lines + _format_line(DIGESTS, digest_text(lines))


def _format_line(name: str, digest: FileDigest) -> str:
    return f"{digest.digest} {digest.size} {name}\n"


def read_digests(checkpoint: Path) -> dict[str, FileDigest]:
    """Read the digests of a checkpoint's files.

    Raises:
        ValueError: they differ from the written digests.
    """
    text = (checkpoint / DIGESTS).read_text("utf-8", errors="replace")
    *lines, last = text.splitlines(keepends=True) or [""]
    expected = _format_line(DIGESTS, digest_text("".join(lines)))
    if last != expected:
        raise ValueError(f"{DIGESTS} is damaged or cut short: its last line is {last!r}, expected {expected!r}")
    digests = {}
    for line in lines:
        digest, size, name = line.rstrip("\n").split(" ", 2)
        digests[name] = FileDigest(int(size), digest)
    return digests


def find_damage(checkpoint: Path, digest: DigestFiles | None = digest_files) -> list[str]:
    """Find the files of a checkpoint that differ from its digests.

    Args:
        digest: reads the files; None looks at their names and sizes alone, which takes no time.

    Returns:
        a line for each file that is missing, cut short, changed or not of this checkpoint; none where all is well.
    """
    try:
        expected = read_digests(checkpoint)
    except (ValueError, OSError) as error:
        return [str(error)]
    there, whole = list_files(checkpoint) - {DIGESTS}, []
    damage = [f"{name} is missing" for name in sorted(expected.keys() - there)]
    damage += [f"{name} is not of this checkpoint: move it away" for name in sorted(there - expected.keys())]
    for name in sorted(there & expected.keys()):
        size = os.path.getsize(checkpoint / name)
        if size == expected[name].size:
            whole.append(name)
        else:
            damage.append(f"{name} has {size} bytes, expected {expected[name].size}")
    if digest:
        try:
            got = digest(checkpoint, whole)
        except OSError as error:  # of a disk that fails; what Ray brings from a rank ends with it
            return [*damage, f"a file cannot be read: {str(error).splitlines()[-1]}"]
        damage += [
            f"{name} has the digest {got[name].digest}, expected {expected[name].digest}"
            for name in whole
            if got[name] != expected[name]
        ]
    return damage


def describe_damage(checkpoint: Path, damage: list[str]) -> str:
    """Name in one line the damaged files of a checkpoint."""
    more = f", and {len(damage) - _NAMED} more" if len(damage) > _NAMED else ""
    return f"checkpoint {str(checkpoint)!r} is damaged: {', '.join(damage[:_NAMED])}{more}"
