"""The families of models that can be trained: a file each, named as its ``model_type``, whose ``FAMILY`` states it.

A further one is a further file here and no line anywhere else. Files that begin with ``_`` hold shared parts.
"""

import pkgutil
from importlib import import_module
from pathlib import Path

from engines.models.family import Family


def list_families() -> list[str]:
    """List the ``model_type`` of every family that there is a file of."""
    return sorted(file.name for file in pkgutil.iter_modules(__path__) if not file.name.startswith("_"))


def find_family(model_type: object, path: Path) -> Family:
    """Find the family of a model type, as its file states it.

    Args:
        model_type: as the config at ``path`` has it.

    Raises:
        ValueError: there is no file of that name, or it states another ``model_type``.
    """
    if model_type not in (families := list_families()):
        raise ValueError(
            f"model: {path} has model_type {model_type!r}, expected one of {families}; to train another family, "
            "add its file in engines/models/families"
        )
    family: Family = import_module(f"{__name__}.{model_type}").FAMILY
    if family.model_type != model_type:
        raise ValueError(
            f"engines/models/families/{model_type}.py states the model_type {family.model_type!r}, expected "
            f"{model_type!r}, its own name; rename one of them"
        )
    return family
