"""Workers with rollout engines, asked from a test, and their answers as a test writes them down. Ray is imported by the
first question."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from engines.batch.samples import Completion, Completions
from engines.weight_sync import pack_buckets


def ask(method, *args) -> Any:
    """Call a method of a worker, such as ``worker.generate``, and wait for what it returns."""
    import ray

    return ray.get(method.remote(*args))


def send(worker, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int = 2**30) -> int:
    """Send weights as the next version, which is returned."""
    version = ask(worker.get_version) + 1
    for bucket, last in pack_buckets(iter(weights), bucket_bytes):
        ask(worker.load_weights, bucket, version, last)
    return version


def make_completion(ids: Sequence[int], logprobs: Sequence[float] = (), version: int = 0) -> Completion:
    """Make a finished completion that weights of one version sampled."""
    return Completion(np.asarray(ids, np.int32), np.asarray(logprobs, np.float32), True, ((version, len(ids)),))


def make_completions(*parts: tuple) -> Completions:
    """Make completions of ``(ids, logprobs, version)``."""
    return Completions.join([make_completion(*part) for part in parts])
