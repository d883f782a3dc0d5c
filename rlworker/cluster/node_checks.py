"""Checks of every node before a run's first step: models, run folder, images, code and packages.

The module does not import torch, so that a node answers before anything heavy is imported there.
"""

import hashlib
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from engines.models.hub import find_here, name_snapshot
from rlworker.base.errors import RunError
from rlworker.cluster.placement import list_nodes, pin_to
from rlworker.cluster.process_state import explain, get_last_line

_ANSWER_S = 300.0
"""Seconds that a node may take to answer, which includes the start of a process there."""
_DOWNLOAD_S = 7200.0
"""Seconds that a node may take to answer if it may have to download a model of the hub first."""
_PACKAGES = ("torch", "megatron-core", "vllm", "ray", "transformers", "numpy")
_CODE = ("rlworker", "engines", "hardware")
_REMEDY = "let every node see the same folders at the same paths and install the same packages, then begin again"


@dataclass(frozen=True)
class Needs:
    """The files that a node must see.

    Attributes:
        models: folders of models. images: folders with images of rows.
        token: a file in the run folder that every node reads, and beside which it writes a file.
    """

    models: tuple[str, ...]
    images: tuple[str, ...]
    token: str


def check_nodes(models: Sequence[str], images: Sequence[str], run_dir: Path) -> None:
    """Check that every node of the cluster sees the same files, packages and code as the driver. It returns at once if
    there is one node.

    Args:
        models: folders of models. images: folders with images of rows. run_dir: the run folder.

    Raises:
        RunError: a node lacks something or has something else; the message names each node and thing.
    """
    nodes = list_nodes()
    if len(nodes) == 1:
        return
    with _writing_token(run_dir) as token:
        needs = Needs(tuple(models), tuple(images), str(token))
        expected = look(needs)
        limit = _DOWNLOAD_S if any(name_snapshot(folder)[0] for folder in models) else _ANSWER_S
        asked: dict[str, Any] = {
            node.address: ray.remote(look)
            .options(num_cpus=0, max_retries=0, scheduling_strategy=pin_to(node.name))
            .remote(needs)
            for node in nodes
        }
        wrong = [
            f"node {address}: {what}"
            for address, reference in asked.items()
            for what in _compare(expected, _wait_for_answer(reference, limit))
        ]
    if wrong:
        raise RunError(f"start: {'; '.join(wrong)}. The driver has them otherwise: {_REMEDY}")


def look(needs: Needs) -> dict[str, str]:
    """Describe models, files and packages of this node: name -> line of text, equal where the thing is equal."""
    seen = {f"model {folder!r}": _describe_model(folder) for folder in needs.models}
    seen |= {f"image folder {folder!r}": _describe_entry(Path(folder)) for folder in needs.images}
    seen |= {f"run folder {str(Path(needs.token).parent)!r}": _try_folder(Path(needs.token))}
    seen |= {f"package {name}": _find_version(name) for name in _PACKAGES}
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(path for package in _CODE for path in (root / package).rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return seen | {"code of rlworker, engines and hardware": f"digest {digest.hexdigest()[:12]}"}


def _wait_for_answer(reference: Any, limit: float) -> dict[str, str] | str:
    """Return a node's description of itself, or why it gave no answer."""
    try:
        return ray.get(reference, timeout=limit)
    except GetTimeoutError:
        return f"no answer within {limit:.0f} s"
    except RayError as error:
        return explain(error) or get_last_line(error)


def _compare(expected: Mapping[str, str], found: Mapping[str, str] | str) -> Iterator[str]:
    if isinstance(found, str):
        yield f"its code cannot answer ({found})"
        return
    for thing, want in expected.items():
        if (have := found.get(thing, "unknown")) != want:
            yield f"{thing} is {have}, expected {want}"


@contextmanager
def _writing_token(run_dir: Path) -> Iterator[Path]:
    token = run_dir / f".nodes.{uuid.uuid4().hex}"
    token.write_text(token.name)
    try:
        yield token
    finally:
        token.unlink()


def _try_folder(token: Path) -> str:
    """Read the driver's file and write another beside it."""
    try:
        if token.read_text() != token.name:
            return "one that shows other text than the driver wrote"
        own = token.with_name(f"{token.name}.{uuid.uuid4().hex}")
        own.write_text("")
        own.unlink()
    except OSError as error:
        return f"not the driver's, or not writable ({error.strerror})"
    return "seen and writable"


def _describe_model(name: str) -> str:
    """Describe a model: its files with their sizes, and the bytes of the files other than weights. A model of the hub's
    cache is looked for in this node's own, and downloaded where it is not there."""
    try:
        folder = Path(find_here(name))
    except ValueError as error:
        return f"not to be had ({error})"
    if not folder.is_dir():
        return "not there"
    digest = hashlib.sha256()
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        if path.suffix == ".json":
            digest.update(path.read_bytes())
    return f"{len(files)} files, digest {digest.hexdigest()[:12]}" if files else "empty"


def _describe_entry(folder: Path) -> str:
    """Describe a folder of images by the number of its entries and their names."""
    if not folder.is_dir():
        return "not there"
    names = sorted(os.listdir(folder))
    return f"{len(names)} entries, digest {hashlib.sha256(chr(0).join(names).encode()).hexdigest()[:12]}"


def _find_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
