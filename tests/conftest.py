"""Fixtures shared by the suite: small saved models, pools of ranks and one Ray instance."""

import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it as it is imported, which comes later
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # or any call of Ray starts one, where no test asked for it
os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's own 15 its workers would starve beside a pool of ranks
os.environ.pop("PYTHONUNBUFFERED", None)  # it would hide output that is not there when a process is killed

import pytest
from support.factors import count_ranks
from support.ranks.pool import Ranks

pytest_plugins = ["support.suite.budget", "support.suite.lanes", "support.suite.measured"]


@pytest.fixture(scope="session")
def make_hf_model(tmp_path_factory):
    """``make(name, tied)`` -> folder of a saved one of ``support.models.LANGUAGE_MODELS``."""
    from support import models

    folders = {}

    def make(name: str, tied: bool) -> str:
        if (name, tied) not in folders:
            folder = tmp_path_factory.mktemp(f"{name}-{'tied' if tied else 'untied'}")
            folders[name, tied] = models.make_language_model(folder, name, tied)
        return folders[name, tied]

    return make


@pytest.fixture(scope="session")
def make_critic(make_hf_model, tmp_path_factory):
    """``make(name)`` -> folder of a saved token classification with one label, its body the language model's."""
    from support import models

    folders = {}

    def make(name: str) -> str:
        if name not in folders:
            folders[name] = models.make_critic(tmp_path_factory.mktemp(f"{name}-critic"), make_hf_model(name, True))
        return folders[name]

    return make


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct, kept beside the packages that it is made of."""
    script = Path(__file__).parents[1] / "scripts" / "real_model.py"
    cache = Path(os.environ.get("RLWORKER_CACHE") or Path.home() / ".cache" / "rlworker")
    made = subprocess.run([sys.executable, script, "smollm2", cache / "smollm2"], capture_output=True, text=True)
    if made.returncode and "can the index be reached?" in made.stderr and "DO NOT MATCH" not in made.stderr:
        pytest.skip(f"the package index cannot be reached: {made.stderr.strip().splitlines()[-1]}")
    assert made.returncode == 0, made.stderr
    return str(cache / "smollm2")


@pytest.fixture(scope="module")
def by_value(request):
    """Send what the test's module defines to Ray's workers as code: they cannot import the tests."""
    import ray

    ray.cloudpickle.register_pickle_by_value(request.module)


@pytest.fixture(scope="session")
def cluster():
    """One Ray for all tests that run workers in this process, with room for the largest of them.

    Their workers are handed on from test to test. One whose modules a test patches must be its own: ``ray.remote``.
    """
    from rlworker.cluster.ray import running_ray
    from rlworker.cluster.worker_pool import keeping_workers

    with running_ray(6, "cpu"), keeping_workers():
        yield


@pytest.fixture(scope="session")
def four_ranks():
    pool = Ranks(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def two_ranks(four_ranks):
    return four_ranks.take_first(2)


@pytest.fixture(scope="session")
def one_rank(four_ranks):
    return four_ranks.take_first(1)


@pytest.fixture
def real_rank(four_ranks):
    """A rank for a model of gigabytes, which it would hold until the suite's end."""
    rank = four_ranks.take_first(1)
    yield rank
    rank.close()


@pytest.fixture
def pool_of(four_ranks):
    """``pool_of(size)``: as many of the session's ranks as a parallel size takes, such as ``"TP2-CP2"``."""

    def take_pool(size: str) -> Ranks:
        return four_ranks.take_first(count_ranks(size))

    return take_pool
