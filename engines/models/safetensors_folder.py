"""The tensors of a folder's safetensors files, by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from engines.models.hub import FOREIGN
from engines.validation import read_object

if TYPE_CHECKING:  # a folder is checked before anything takes the time to import torch
    from torch import Tensor

INDEX = "model.safetensors.index.json"
"""Name of the file that says which file has which tensor."""


class SafetensorsFolder:
    """Every tensor of a folder's safetensors files by name, read one at a time.

    Attributes:
        folder: its path. file_of: name of a tensor -> the file that has it.
        headers: file -> its header, which tells names, shapes and types without reading a tensor.

    Raises:
        ValueError: a file is missing or damaged, two hold the same tensor, or the index names other files.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self.file_of: dict[str, Path] = {}
        self._open = {}
        self.headers = {}
        for path in find_weight_files(Path(folder)):
            try:
                # Without torch, which a header does not need and which takes seconds to import.
                self.headers[path] = safe_open(path, "np")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"model: {path} is damaged: {error}; copy or save it again") from None
            for name in self.headers[path].keys():  # noqa: SIM118 (it is no dict)
                if name in self.file_of:
                    raise ValueError(f"model: {path} and {self.file_of[name]} both hold {name!r}; move one file away")
                self.file_of[name] = path

    def __contains__(self, name: str) -> bool:
        return name in self.file_of

    def __getitem__(self, name: str) -> Tensor:
        return self._find_file(name).get_tensor(name)

    def read_rows(self, name: str, start: int, count: int) -> Tensor:
        """Read ``count`` rows of a tensor, from row ``start``, and no others."""
        return self._find_file(name).get_slice(name)[start : start + count]

    def _find_file(self, name: str):
        path = self.file_of[name]
        if path not in self._open:
            self._open[path] = safe_open(path, "pt")
        return self._open[path]


def list_tensor_names(folder: str) -> frozenset[str]:
    """List the names of a folder's tensors; none of a folder without weights, from which a plan is made.

    Raises:
        ValueError: as ``SafetensorsFolder``.
    """
    if not any(Path(folder).glob("*.safetensors")):
        return frozenset()
    return frozenset(SafetensorsFolder(folder).file_of)


def find_weight_files(folder: Path) -> list[Path]:
    """Find the safetensors files of a folder; with an index it must name all of them."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model: {str(folder)!r} has no *.safetensors file; weights are read from safetensors only")
    foreign, index = {*folder.glob(FOREIGN)}, folder / INDEX
    if not index.is_file():
        if foreign and len(files) > len(foreign):
            raise ValueError(
                f"model: {min(foreign)} holds the weights once more, in another form, and vLLM would read it too: "
                f"expected {INDEX}, which names the files to read; move the consolidated files away"
            )
        return files
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"model: {index} has no weight_map of tensors to files; remove it or save the model again")
    named = set(weight_map.values())
    files = [path for path in files if path.name in named or path not in foreign]
    missing, unnamed = sorted(named - {path.name for path in files}), sorted({path.name for path in files} - named)
    if missing or unnamed:
        raise ValueError(
            f"model: {index} does not fit the folder: it names {missing[:5]} ({len(missing)} in all), which are not "
            f"there, and leaves out {unnamed[:5]} ({len(unnamed)} in all); copy or move them, or save the model again"
        )
    return files
