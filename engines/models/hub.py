"""Models by name: a folder of this machine, or one of the HuggingFace hub, which lies in the hub's cache."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

SETTINGS = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".bpe")
"""Endings of the files of a model's configuration and tokenizer."""
FOREIGN = "consolidated*.safetensors"
"""Files that hold the weights once more, in the form of their maker's own library (Mistral's)."""
PREFIX = "hf:"
"""What the name of a model of the hub begins with: ``hf:ORG/NAME``, ``hf:ORG/NAME@REVISION``."""
_FORM = re.compile(r"hf:(?P<repository>[^/@\s]+/[^/@\s]+)(@(?P<revision>\S+))?")
_SNAPSHOT = re.compile(r".*/models--(?P<repository>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})")
"""Folder of one commit in the hub's cache, where ``--`` stands for the slash of the repository's name."""
_FILES = (*(f"*{ending}" for ending in SETTINGS), "*.safetensors")

FindModel = Callable[[str], str]
"""``find(name)`` -> the folder that the name of a model means."""


def find_model(name: str, commit: str = "", files: Sequence[str] = _FILES) -> str:
    """Find the folder that the name of a model means, on this machine.

    Args:
        name: a folder; or, if no folder is named so, a model of the hub, ``hf:ORG/NAME`` or ``hf:ORG/NAME@REVISION``.
        commit: of the hub's model, in place of the revision.
        files: patterns of the files that are needed of one of the hub.

    Returns:
        the folder, which need not be there; of a model of the hub that in its cache, downloaded where it is not there.

    Raises:
        ValueError: it is no name of a model of the hub, or one that is neither in the cache nor to be had.
    """
    if not name.startswith(PREFIX) or Path(name).is_dir():
        return name
    if not (parts := _FORM.fullmatch(name)):
        raise ValueError(
            f"model: {name!r} is no folder, expected hf:ORG/NAME or hf:ORG/NAME@REVISION for a model of the hub, such "
            "as hf:HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(
            parts["repository"],
            revision=commit or parts["revision"],
            allow_patterns=[*files],
            ignore_patterns=["*/*.safetensors", FOREIGN],  # other forms of the weights
        )
    except Exception as error:  # each way to the hub fails with errors of its own
        at = f" at {commit}" if commit else ""
        raise ValueError(f"model: {name!r}{at} {_explain(error, parts['repository'])}") from error


def _explain(error: Exception, repository: str) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return (
            f"is gated: accept its terms at https://huggingface.co/{repository}, then log in with hf auth login, or "
            "set HF_TOKEN"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return "is not on the hub, or private: mend the name, or log in with hf auth login, or set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no such revision: take a branch, tag or commit of https://huggingface.co/{repository}"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            "is not whole in the hub's cache, and the hub was not reached: set HF_HUB_OFFLINE=0 and see to the network "
            f"(HF_ENDPOINT), or give the path of a folder that has it. {str(error).splitlines()[0]}"
        )
    return f"cannot be had from the hub: {type(error).__name__}: {error}"


def name_snapshot(folder: str) -> tuple[str, str]:
    """Name the model of the hub whose commit a folder of the hub's cache holds: the name and the commit, or nothing
    twice where it is another folder."""
    if not (parts := _SNAPSHOT.fullmatch(folder)):
        return "", ""
    return PREFIX + parts["repository"].replace("--", "/"), parts["commit"]


def find_here(folder: str) -> str:
    """Find the folder on this machine that another machine has by this name: the same, or the commit of the hub's that
    it holds in this machine's cache. Raises ValueError as ``find_model``."""
    name, commit = name_snapshot(folder)
    return find_model(name, commit) if name else folder
