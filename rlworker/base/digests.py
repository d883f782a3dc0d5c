"""Digests of a checkpoint's files, which show damage before the files are loaded.

``digests.txt`` has one line for each file: digest, size in bytes, and path in the checkpoint. Its last line is for
``digests.txt`` itself, over the lines above.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

DIGESTS = "digests.txt"
"""File of a checkpoint with the digests of its other files."""
_READ_BYTES = 4 * 2**20
_THREADS = 8
"""Number of files that are read at a time: a striped or network disk serves one reader at a fraction of its rate."""
_NAMED = 5
"""Most damaged files of a checkpoint that a message names."""


@dataclass(frozen=True)
class FileDigest:
    """Size and digest of a file.

    Attributes:
        size: bytes. digest: xxh3 of 128 bits, as hexadecimal digits.
    """

    size: int
    digest: str


DigestFiles = Callable[[Path, list[str]], Mapping[str, FileDigest]]
"""``digest_files(folder, names)`` returns path in the folder -> digest."""


def digest_text(text: str) -> FileDigest:
    """Compute the digest of a file that would hold this text."""
    data = text.encode()
    return FileDigest(len(data), xxhash.xxh3_128_hexdigest(data))


def digest_file(path: Path) -> FileDigest:
    """Compute the digest of a file, some megabytes in memory at a time. OSError, with the path, if unreadable."""
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
    """Compute the digests of files in a folder, several at a time. Returns path in the folder -> digest."""
    names = list(names)
    with ThreadPoolExecutor(min(_THREADS, max(1, len(names)))) as pool:
        return dict(zip(names, pool.map(lambda name: digest_file(Path(folder) / name), names), strict=True))


def list_files(folder: Path) -> set[str]:
    """Return the paths of all files in a folder and its subfolders, relative to the folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def format_digests(digests: Mapping[str, FileDigest]) -> str:
    """Write the text of a checkpoint's ``digests.txt``: one line "digest size path" for each file, sorted by path.

    Args:
        digests: path of a file in the checkpoint -> digest.
    """
    lines = "".join(_format_line(name, digests[name]) for name in sorted(digests))
    return lines + _format_line(DIGESTS, digest_text(lines))


def _format_line(name: str, digest: FileDigest) -> str:
    return f"{digest.digest} {digest.size} {name}\n"


def read_digests(checkpoint: Path) -> dict[str, FileDigest]:
    """Read ``digests.txt`` of a checkpoint. Returns path in the checkpoint -> digest.

    Raises:
        ValueError: ``digests.txt`` is damaged.
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
    """Compare the files of a checkpoint with its ``digests.txt``.

    Args:
        digest: computes the digests of files; None compares only names and sizes, which is quick.

    Returns:
        one line for each file that is missing, truncated, changed or unknown; empty if all files are whole.
    """
    if not (checkpoint / DIGESTS).exists():
        return [f"{DIGESTS} is missing"]
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
        except OSError as error:  # a failing disk; a rank's error comes through Ray and ends with the same text
            return [*damage, f"a file cannot be read: {str(error).splitlines()[-1]}"]
        damage += [
            f"{name} has the digest {got[name].digest}, expected {expected[name].digest}"
            for name in whole
            if got[name] != expected[name]
        ]
    return damage


def describe_damage(checkpoint: Path, damage: list[str]) -> str:
    """Describe the damage of a checkpoint in one line."""
    more = f", and {len(damage) - _NAMED} more" if len(damage) > _NAMED else ""
    return f"checkpoint {str(checkpoint)!r} is damaged: {', '.join(damage[:_NAMED])}{more}"
