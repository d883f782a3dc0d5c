"""Interfaces of the training engine and the rollout engine, as the RL side calls them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.batch.samples import Completion, Request
from engines.batch.shard import Outputs, Shard
from engines.models.spec import ModelSpec
from engines.weight_digest import DigestPlan

LossFn = Callable[[Any, TrainBatch], tuple[Tensor, dict[str, Tensor]]]
"""``loss_fn(outputs, batch) -> (sum, metrics)``: a scalar SUM over the batch's tokens, never a mean, and metric sums.

``outputs`` are of the engine's own kind, with columns ``[N]``; logprobs and entropies of targets that neither count nor
have a weight are 0 (``Shard.find_scored``). The engine divides the sum by the denominator of the
whole optimizer step, so a loss does not depend on how the batch was cut. Metric sums are added over micro-batches and
data-parallel ranks; a name that ends in ``_max`` is a maximum.
"""

OffloadPart = Literal["weights", "gradients", "optimizer"]
"""Parts of a training engine on its device; ``optimizer`` is the moments, and fp32 masters of bf16 weights."""
Tag = Literal["weights", "kv_cache"]
"""Parts of a rollout engine on its devices, by vLLM's names."""


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, on one data-parallel rank.

    Attributes:
        metrics: metric sums over this rank's shard.
        outputs: outputs of this rank's shard, from the weights before the step; None on ranks that are not the leader.
        grad_norm: global L2 norm of the gradient before clipping; NaN if the gradient was not finite on some rank, in
            which case the weights are unchanged.
        lr: the learning rate of the step.
        routing: metrics of the routers of experts, of all replicas and the same on every rank; a model without experts
            has none.
    """

    metrics: dict[str, float]
    outputs: Outputs | None
    grad_norm: float
    lr: float
    routing: dict[str, float] = field(default_factory=dict)


class TrainEngine(Protocol):
    """A training engine, spread over ranks. Every rank holds one, and all ranks must call each method together."""

    model: ModelSpec
    dp_rank: int
    dp_size: int
    is_leader: bool
    """Whether this rank returns the outputs of its data-parallel replica."""

    def forward(self, shard: Shard, raw: bool = False, every: bool = False) -> Outputs | None:
        """Compute outputs ``[N]`` of this replica's shard, in its order; None on ranks that are not the leader.

        Logprobs and entropies are computed for targets that count or have a weight (``Shard.find_scored``), and are 0
        elsewhere.

        Args:
            raw: whether to take the logits as they are, at temperature 1 and with no token banned.
            every: whether to compute logprobs and entropies of all targets.
        """
        ...

    def train_step(self, shard: Shard, loss_fn: LossFn, denominator: float) -> StepResult:
        """Take one optimizer step on ``sum(loss) / denominator``, over the shards of all replicas."""
        ...

    def export_weights(self, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(HF name, full tensor)`` of every weight, one at a time, on the first replica's leader or on all
        ranks."""
        ...

    def save(self, folder: str) -> list[str]:
        """Write weights, optimizer and the schedule of the learning rate into an empty folder; every rank writes its
        share.

        Returns:
            the names of the files that this rank wrote.
        """
        ...

    def load(self, folder: str) -> None:
        """Load a checkpoint that ``save`` wrote."""
        ...

    def offload(self, parts: Sequence[OffloadPart]) -> None:
        """Move parts to the host's memory. Calls that need an offloaded part raise RuntimeError."""
        ...

    def onload(self, parts: Sequence[OffloadPart]) -> None:
        """Move parts back onto the device."""
        ...


class RolloutEngine(Protocol):
    """A rollout engine: it samples completions and loads new weights."""

    version: int
    """Version of its weights; the starting weights are version 0."""
    weight_way: str
    """Way by which it takes new weights, of ``Platform.find_weight_ways``."""

    def sample(self, requests: Sequence[Request], seed: int) -> list[Completion]:
        """Sample the completions of all requests, and return them once the last is done."""
        ...

    def seed(self, seed: int) -> None:
        """Draw from the random numbers of ``seed`` from now on."""
        ...

    def load_weights(self, bucket: Any, version: int, last: bool) -> None:
        """Load a bucket of new weights, which count as ``version`` after the ``last``. A first bucket begins anew."""
        ...

    def begin_transfer(self, version: int) -> None:
        """Begin an update by vLLM's weight transfer, whose weights will count as ``version``."""
        ...

    def transfer(self, step: str, info: dict[str, Any]) -> None:
        """Take a step of vLLM's weight transfer, by the name of its method."""
        ...

    def end_transfer(self, version: int, checksums: Mapping[str, int]) -> None:
        """End an update: the weights count as ``version`` if all have come with the sender's checksums."""
        ...

    def digest_weights(self, plan: DigestPlan) -> dict[str, int | None]:
        """Return name -> digest of the weights that the engine computes with; None if one cannot be read back."""
        ...

    def rewind(self, version: int) -> None:
        """Accept ``version`` as the next update, even if it is older than the engine's version."""
        ...

    def sleep(self, level: int) -> None:
        """Free the devices: level 1 keeps the weights on the host, 2 drops them, so that a sync must follow."""
        ...

    def wake(self, tags: Sequence[Tag]) -> None:
        """Allocate the parts named by ``tags`` again, after a sleep."""
        ...
