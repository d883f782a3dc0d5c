"""Workers with rollout engines, asked from a test. Ray is imported by the first question."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

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
