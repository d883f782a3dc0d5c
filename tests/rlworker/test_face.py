"""What ``from rlworker import ...`` offers."""

import ast
from pathlib import Path

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


def test_readers_of_types_are_told_the_same_names():
    (block,) = (node for node in SOURCE.body if isinstance(node, ast.If))
    told = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert told == set(rlworker.__all__)


def test_a_stranger_has_no_name():
    with pytest.raises(ImportError, match="cannot import name 'Trainr' from 'rlworker'"):
        from rlworker import Trainr  # noqa: F401
