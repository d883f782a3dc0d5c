"""Digests of a run's inputs, by which --resume notices that rows or a model have changed since the run began."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import xxhash

from engines.models.folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from engines.models.folders.hf_folder import list_model_files
from engines.models.hub import PREFIX, find_model, name_snapshot
from engines.models.spec import ModelSpec
from rlworker.base.digests import FileDigest, digest_file, digest_files
from rlworker.config.sections import DataConfig
from rlworker.data.sources import iterate_rows, list_files
from rlworker.tracking.step_lines import write_whole

if TYPE_CHECKING:
    from engines.config.served import ClassifierSpec, ServedModel

Digests = dict[str, dict[str, str]]
"""Name of an input ("actor", "data.train") -> part of it, mostly a file -> digest of the part."""
INPUTS = "inputs.json"
_MODELS = {"model": "actor", "algorithm.reference": "reference", "critic.model": "critic"}
"""Setting that names a model -> its role."""
_ADAPTERS = "actor.lora.start"
"""Setting that names a folder of adapters, and name of the input."""
_HUB = "hub"
"""Name of the input that lists the models of the hub: name -> commit."""


class Inputs:
    """The inputs of a run: models, adapters, rows and images. Their digests are in ``inputs.json`` of the run folder.

    Args:
        folder: the run folder.

    Attributes:
        models: role -> model. model_folders, image_folders: folders of the models and of the adapters to start from,
            and of the rows' images. All three are filled by ``hold``.
    """

    def __init__(self, folder: Path):
        self._folder, self._held = folder, Digests()
        self.models: dict[str, ModelSpec] = {}
        self.model_folders: set[str] = set()
        self.image_folders: set[str] = set()

    def find_model(self, name: str) -> str:
        """Return the folder of the model ``name``; a model of the hub keeps the commit that the run began with."""
        commits = self._read().get(_HUB, {}) | self._held.get(_HUB, {})
        folder = find_model(name, commits.get(name, ""))
        if name.startswith(PREFIX) and (commit := name_snapshot(folder)[1]):
            self._held[_HUB] = commits | {name: commit}
        return folder

    def hold(
        self,
        data: DataConfig,
        models: Mapping[str, ModelSpec] | None = None,
        rows: Sequence[Any] = (),
        sources: Iterable[str] = (),
        adapters: str = "",
        served: Mapping[str, ServedModel] = MappingProxyType({}),
    ) -> None:
        """Compare inputs with those that the run began with; of a new run, keep their digests for ``write``.

        Rows may stand at another path than before, in files of other names but of the same digests and order.

        Args:
            data: settings of the data; the rows' files are read unless they were held before.
            models: role -> model.
            rows: rows as they were read, with their images.
            sources: paths of the rows to train on, if there are several.
            adapters: folder of the adapters that the actor starts from; empty where it starts from none.
            served: served models by name; the files of judges are digested too.

        Raises:
            ValueError: the run in the folder began with other inputs; the message names them.
        """
        self.models |= models or {}
        self.model_folders |= {model.folder for model in self.models.values()} | ({adapters} if adapters else set())
        self.image_folders |= {os.path.dirname(image.path) for row in rows for image in row.images}
        paths = {"data.train": data.train, "data.heldout": data.heldout}
        paths |= {f"curriculum.sources {path}": path for path in sources if path != data.train}
        paths |= {f"data.heldout_sets {name}": path for name, path in data.heldout_sets.items()}
        found = {name: _digest_rows(path) for name, path in paths.items() if path and name not in self._held}
        recorded = self._read()
        named = {f"models.{name}": each for name, each in served.items()}
        self.model_folders |= {each.spec.folder for each in named.values()}
        every = {**(models or {}), **{f"{name}.model": each.spec for name, each in named.items()}}
        found |= _digest_models(every, recorded) | _digest_images(rows)
        files = {f"{name}.template": each.config.template for name, each in named.items() if each.config.template}
        found |= {name: {"": digest_file(Path(file)).digest} for name, file in files.items()}
        if adapters:
            found[_ADAPTERS] = _spell_digests(digest_files(adapters, (ADAPTER_CONFIG, ADAPTER_WEIGHTS)))
        if changes := list(_list_changes(recorded, found)):
            raise ValueError(
                f"run_dir: {str(self._folder)!r} cannot be resumed with another model or other data: "
                f"{'; '.join(changes)}. Put back the old model and data, or start a new run from its weights: "
                f"--run-dir ANOTHER --model {self._folder}/checkpoints/step_N/hf"
            )
        self._held |= found

    def list_movable(self) -> set[str]:
        """List the settings that name an input with a digest: a run goes on where they name the same at another
        path."""
        recorded = self._read()
        rows = {name.partition(" ")[0] for name in recorded if name.startswith("data.")}
        served = {name for name in recorded if name.startswith("models.")}
        roles = {setting for setting, role in _MODELS.items() if role in recorded}
        return rows | roles | served | ({_ADAPTERS} & {*recorded})

    def write(self) -> str:
        """Write the digests of the held inputs into the run folder; returns a note if the run had no digests before."""
        lacks = (self._folder / "config.json").exists() and not (self._folder / INPUTS).exists()
        write_whole(self._folder / INPUTS, json.dumps(self._read() | self._held, indent=1) + "\n")
        return f"; NOTE it had no {INPUTS}, so that other data or models would not be noticed" if lacks else ""

    def describe_models(self) -> dict[str, str]:
        """Describe each model: role -> "hf:ORG/NAME at 0123abc, qwen2, 24 layers, 494,032,768 weights"."""
        texts = {}
        for role, model in self.models.items():
            name, commit = name_snapshot(model.folder)
            name = f"{name} at {commit[:7]}" if name else os.path.basename(model.folder)
            sizes = f"{model.layers} layers, {model.count_weights():,} weights"
            texts[role] = f"{name}, {model.model_type}, {sizes}"
        return texts

    def _read(self) -> Digests:
        """Read the digests that the run in the folder began with; none where there is no run, or it has none."""
        if not (self._folder / "config.json").exists() or not (path := self._folder / INPUTS).exists():
            return {}
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"run_dir: {str(path)!r} cannot be read: {error}; restore it from a copy") from None


def _digest_rows(path: str) -> dict[str, str]:
    """Digest the files that have the rows, or the rows themselves where files may hold the same in other bytes."""
    if files := list_files(path):
        return _spell_digests(digest_files("", files))
    count, state = 0, xxhash.xxh3_128()
    for _, source in iterate_rows(path):
        count += 1
        # JSON cannot hold an image's bytes or a date.
        text = json.dumps(
            source, sort_keys=True, default=lambda x: xxhash.xxh3_128_hexdigest(x) if isinstance(x, bytes) else repr(x)
        )
        state.update(text.encode())
    return {path: f"{count} rows, digest {state.hexdigest()}"}


def _spell_digests(digests: Mapping[str, FileDigest]) -> dict[str, str]:
    return {name: f"{one.size} bytes, digest {one.digest}" for name, one in digests.items()}


def _digest_images(rows: Sequence[Any]) -> Digests:
    """Digest images and videos; rows may have their paths alone."""
    digests = [image.digest for row in rows for image in row.images]
    return (
        {"data": {"images": f"{len(digests)}, digest {xxhash.xxh3_128_hexdigest(''.join(digests).encode())}"}}
        if digests
        else {}
    )


def _digest_models(models: Mapping[str, ModelSpec | ClassifierSpec], recorded: Container[str]) -> Digests:
    """Digest the files of models; for a model in the hub's cache its commit suffices, unless its role has digests."""
    folders = {model.folder for role, model in models.items() if role in recorded or not name_snapshot(model.folder)[0]}
    of_folder = {folder: _spell_digests(digest_files(folder, list_model_files(folder))) for folder in folders}
    return {role: of_folder[model.folder] for role, model in models.items() if model.folder in folders}


def _list_changes(before: Digests, now: Digests) -> Iterator[str]:
    for name in sorted(before.keys() & now.keys()):
        old, new = before[name], now[name]
        if name.startswith("data.") and [*old.values()] == [*new.values()]:
            continue  # the same rows, at another path where the files' names differ
        if not old.keys() & new.keys():
            yield f"{name} was {_spell_files(old)}, is {_spell_files(new)}"
            continue
        for part in sorted(old.keys() | new.keys()):
            if (was := old.get(part, "not there")) != (found := new.get(part, "not there")):
                yield f"{name} {part} was {was}, is {found}"


def _spell_files(files: Mapping[str, str]) -> str:
    shown = [f"{name} ({text})" for name, text in sorted(files.items())[:3]]
    return ", ".join([*shown, f"{len(files) - 3} more"] if len(files) > 3 else shown)
