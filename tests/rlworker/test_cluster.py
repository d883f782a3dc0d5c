import gc
import os
import sys
import time

import pytest
import ray

from rlworker.cluster import WorkerFailure, naming_failures, no_collection, ray_for

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


class Worker:
    def __repr__(self):
        return "actor rank 1"

    def die(self):
        os._exit(1)

    def fail(self):
        raise KeyError("level")

    def hang(self):
        time.sleep(100)


def test_who_failed_is_named_among_workers_that_hang():
    with ray_for(3):
        workers = {f"actor rank {i}": ray.remote(Worker).options(num_cpus=1).remote() for i in range(3)}
        named = r"(?s)^step 2, phase update: .*repr=actor rank 1.*KeyError: 'level'"
        with pytest.raises(WorkerFailure, match=named), naming_failures("step 2, phase update", workers):
            ray.get(workers["actor rank 1"].fail.remote())
        died = r"^step 3, phase sync: actor rank 0 died .*say more\); go on$"
        with pytest.raises(WorkerFailure, match=died), naming_failures("step 3, phase sync", workers, "; go on"):
            ray.get([workers["actor rank 2"].hang.remote(), workers["actor rank 0"].die.remote()])
        with pytest.raises(RuntimeError, match="need 40 CPUs"), ray_for(40):
            pass
        assert ray.is_initialized(), "whoever found Ray there leaves it there"
    assert not ray.is_initialized()


def test_collection_goes_on_afterwards():
    with pytest.raises(ImportError), no_collection():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() > 0
    gc.unfreeze()
