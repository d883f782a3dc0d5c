"""What ``from rlworker import ...`` offers."""

import ast
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import rlworker

SOURCE = ast.parse(Path(rlworker.__file__).read_text())


def test_every_name_is_there_and_is_what_its_home_has():
    import engines.batch.batch
    import rlworker.algorithms.losses
    import rlworker.trainers.rl

    assert all(getattr(rlworker, name) is not None for name in rlworker.__all__)
    assert rlworker.Trainer is rlworker.trainers.rl.Trainer and rlworker.TrainBatch is engines.batch.batch.TrainBatch
    assert rlworker.losses is rlworker.algorithms.losses and callable(rlworker.batch_reward)
    assert set(rlworker.__all__) <= set(dir(rlworker))


def list_sections(kind: type) -> set[type]:
    """List a class of settings and those of its sections, and of sections in dicts."""
    found = {kind}
    for hint in get_type_hints(kind).values():
        for each in (hint, *get_args(hint)):
            if is_dataclass(each) and isinstance(each, type):
                found |= list_sections(each)
    return found


@pytest.mark.parametrize("whole", ["RunConfig", "SftConfig"])
def test_every_section_of_the_settings_can_be_imported_to_be_set(whole):
    sections = list_sections(getattr(rlworker, whole))
    assert len(sections) >= 8 and {kind.__name__ for kind in sections} - set(rlworker.__all__) == set()
    assert all(getattr(rlworker, kind.__name__) is kind for kind in sections)


def test_what_an_environment_may_catch_can_be_imported():
    from rlworker.environments.policy import EpisodeLimit, NoVerdict, ToolFailure

    assert (rlworker.EpisodeLimit, rlworker.NoVerdict, rlworker.ToolFailure) == (EpisodeLimit, NoVerdict, ToolFailure)


def test_readers_of_types_are_told_the_same_names():
    (block,) = (node for node in SOURCE.body if isinstance(node, ast.If))
    told = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert told == set(rlworker.__all__)


def test_a_stranger_has_no_name():
    with pytest.raises(ImportError, match="cannot import name 'Trainr' from 'rlworker'"):
        from rlworker import Trainr  # noqa: F401
