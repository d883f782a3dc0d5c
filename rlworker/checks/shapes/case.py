"""A rank to run in shapes and the counts of its run, as plain data between processes."""

from dataclasses import dataclass, field
from typing import Literal

from engines.config import MegatronConfig
from engines.models.spec import ModelSpec
from hardware.shapes.calls import Call

Routes = Literal["balanced", "worst"]
"""Ways of tokens to experts: each rank gets equally many, or this one all that it can get."""


@dataclass(frozen=True)
class RankCase:
    """A rank to run in shapes.

    Attributes:
        platform: name of the platform. rank: the rank's number.
        length: tokens of each sequence. sequences: sequences of each micro-batch. micro_batches: their number.
        bucket_bytes: most bytes of a bucket of exported weights.
    """

    model: ModelSpec
    config: MegatronConfig
    platform: str
    rank: int
    length: int
    sequences: int
    micro_batches: int
    routes: Routes = "balanced"
    bucket_bytes: int = 2**26

    @property
    def stage(self) -> int:
        """Pipeline stage of the rank."""
        return self.rank // self.stage_ranks

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.config.ranks // self.config.pp


@dataclass
class RankCount:
    """The counts of a rank that ran.

    Attributes:
        seconds: phase -> seconds that it took here.
        held: parameters, gradients, optimizer -> bytes on the device after the step.
        peaks: phase -> most bytes on the device. begins: phase -> bytes at its begin.
        kept: most bytes that autograd held for backward passes.
        tensors, buckets, exported: number of exported tensors and of their buckets, and bytes; 0 on ranks that hand
            their parts to another.
        flops: of a step's matrix products, convolutions and attention, recomputation included. operators: number
            of a step's operators.
        calls: collectives and messages of a step, in their order.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    begins: dict[str, int] = field(default_factory=dict)
    kept: int = 0
    operators: int = 0
    tensors: int = 0
    buckets: int = 0
    exported: int = 0
    flops: int = 0
    calls: list[Call] = field(default_factory=list)

    @property
    def activations(self) -> int:
        """Most bytes beside weights, gradients and optimizer state, in the passes or in the optimizer step."""
        passes = self.peaks["passes"] - self.begins["passes"]
        return max(passes, self.peaks["optimizer"] - sum(self.held.values()))

    @property
    def total(self) -> int:
        """Peak of a training step after the first, in bytes."""
        return sum(self.held.values()) + self.activations
