"""The families of models that can be trained: one file for each ``model_type``, with a ``FAMILY`` that describes it.

A new family is a new file in one of the folders here and no line anywhere else. Files that begin with ``_`` are shared
by several families.
"""

import pkgutil
from importlib import import_module
from pathlib import Path

from engines.models.family import Family


def list_families() -> dict[str, str]:
    """List the families that there are files of: ``model_type`` -> module."""
    modules = (module.name for module in pkgutil.walk_packages(__path__, f"{__name__}.") if not module.ispkg)
    named = {name.rpartition(".")[2]: name for name in modules}
    return {name: module for name, module in sorted(named.items()) if not name.startswith("_")}


def find_family(model_type: object, path: Path) -> Family:
    """Find the family of a model type, as its file states it.

    Args:
        model_type: as the config at ``path`` has it.

    Raises:
        ValueError: there is no file of that name, or it states another ``model_type``.
    """
    files = list_families()
    if not isinstance(model_type, str) or model_type not in files:
        raise ValueError(
            f"model: {path} has model_type {model_type!r}, expected one of {list(files)}; to train another family, "
            "add its file in engines/models/families"
        )
    family: Family = import_module(files[model_type]).FAMILY
    if family.model_type != model_type:
        raise ValueError(
            f"{files[model_type]} states the model_type {family.model_type!r}, expected {model_type!r}, its own name; "
            "rename one of them"
        )
    return family
