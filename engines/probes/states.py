"""Sketches of all states that a rank of the training engine computes in a step, layer by layer and token by token.

A sketch has a few random projections of a token's hidden state, its norm, and a hash of its bits. So two machines can
compare a whole step by a few numbers a token. The step itself computes the same bits, recorded or not.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from engines.batch.batch import TrainBatch
from engines.batch.shard import Outputs, Shard, change_columns, list_columns
from engines.interfaces import LossFn, StepResult
from engines.megatron.engine import MegatronEngine
from engines.probes.rounding import rounding_otherwise
from engines.weight_digest import DigestPlan, sum_columns

PROJECTIONS = 4
"""Number of random projections of a state."""


@dataclass
class Record:
    """The states and losses of one optimizer step on one rank, in the order of its shard.

    Attributes:
        values: number of a stage -> ``[N, PROJECTIONS + 1]`` float32, the projections and then the norm. Stage 0 is the
            embeddings with features of images, then come the layers, and last the hidden states that the head takes.
        bits: number of a stage -> ``[N]`` int64, a hash of the state's bits.
        slopes: name of an output -> ``[N]`` float32, derivative of the micro-batch's loss by it; on leaders alone.
        outputs: the outputs ``[N]``, where nothing but a forward pass was run; on leaders alone.
    """

    values: dict[int, Any] = field(default_factory=dict)
    bits: dict[int, Any] = field(default_factory=dict)
    slopes: dict[str, Any] = field(default_factory=dict)
    outputs: Outputs | None = None

    def join(self) -> "Record":
        """Join the parts of micro-batches, on the host."""

        def cat(part: dict[Any, list[Tensor]]) -> dict[Any, Tensor]:
            return {name: torch.cat(each).cpu() for name, each in part.items()}

        return Record(cat(self.values), cat(self.bits), cat(self.slopes), self.outputs)


def sketch(states: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Sketch states ``[..., hidden]``: values ``[..., PROJECTIONS + 1]`` float32, and bits ``[..., 1]`` int64."""
    flat = states.detach().flatten(0, -2)
    columns, exact = np.arange(flat.shape[1]), flat.float()
    bits = sum_columns(flat, columns, columns, flat.dtype)
    values = torch.cat([exact @ directions.to(exact.device), exact.norm(dim=1, keepdim=True)], dim=1)
    return values.unflatten(0, states.shape[:-1]), bits.view(*states.shape[:-1], 1)


@contextmanager
def watching_states(engine: MegatronEngine, keep: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call ``keep(stage, states)`` in this context with all states ``[s / tp, b, h]`` of this rank, dummies' too.

    Stages are those of ``Record``. A layer that is recomputed comes again.
    """
    block, last = engine.decoder.decoder, engine.model.layers + 1

    def keep_embeddings(_: Any, args: Any, kwargs: Any) -> None:
        keep(0, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    def keep_layer(layer: Any, _: Any, output: Any) -> None:
        keep(layer.layer_number, output[0] if isinstance(output, tuple) else output)

    def keep_last(_: Any, __: Any, output: Any) -> None:
        keep(last, output)

    hooks = [layer.register_forward_hook(keep_layer) for layer in block.layers]
    if engine.decoder.pre_process:
        hooks.append(block.register_forward_pre_hook(keep_embeddings, with_kwargs=True))
    if engine.decoder.post_process:
        hooks.append(block.register_forward_hook(keep_last))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class StateRecorder:
    """Records the states of an engine's micro-batches, dummies aside, while ``recording`` is entered."""

    def __init__(self, engine: MegatronEngine):
        self.engine, self.record = engine, Record()
        hidden = engine.model.hidden
        signs = np.random.default_rng(hidden).integers(0, 2, (hidden, PROJECTIONS))  # the same on every machine
        self._directions = torch.from_numpy(2 * signs - 1).float()
        self._seen: set[int] = set()  # stages of the micro-batch in hand: a layer that is recomputed comes again
        self._layout: Any = None
        self._is_dummy = False

    @contextmanager
    def recording(self) -> Iterator[Record]:
        """Record what runs in this context."""
        engine = self.engine
        forward = engine.forward_micro_batch

        def forward_micro_batch(module: Any, micro: TrainBatch, layout: Any, is_dummy: bool = False) -> Tensor:
            self._layout, self._is_dummy, self._seen = layout, is_dummy, set()
            return forward(module, micro, layout, is_dummy)

        with watching_states(engine, self._keep), patch.object(engine, "forward_micro_batch", forward_micro_batch):
            yield self.record

    def watch(self, loss: LossFn) -> LossFn:
        """Return the loss, which also records its derivatives by the outputs of each micro-batch."""

        def compute(outputs: Outputs, micro: TrainBatch):
            if not self._is_dummy:
                self.keep_slopes(loss, outputs, micro)
            return loss(outputs, micro)

        return compute

    def keep_slopes(self, loss: LossFn, outputs: Outputs, micro: TrainBatch) -> None:
        """Record the derivatives of a micro-batch's loss by its outputs."""
        if not self.engine.is_leader:
            return
        leaves = change_columns(outputs, lambda _, column: column.detach().requires_grad_())
        columns = {name: column for name, column in list_columns(leaves).items() if column.dim() == 1}
        with torch.enable_grad():
            total = loss(leaves, micro)[0]
            slopes = torch.autograd.grad(total, [*columns.values()], allow_unused=True) if total.requires_grad else ()
        for (name, column), slope in zip(columns.items(), slopes or (None,) * len(columns), strict=True):
            found = torch.zeros_like(column) if slope is None else slope
            self.record.slopes.setdefault(name, []).append(found.detach())

    @torch.no_grad()
    def _keep(self, stage: int, states: Tensor) -> None:
        """Keep the sketch of a stage's states ``[s / tp, b, h]``."""
        if self._is_dummy or stage in self._seen:
            return
        self._seen.add(stage)
        ranks, is_first = mpu.get_context_parallel_group(), mpu.get_tensor_model_parallel_rank() == 0
        is_first = is_first and mpu.get_context_parallel_rank() == 0
        for kept, part in zip((self.record.values, self.record.bits), sketch(states, self._directions), strict=True):
            if self.engine.transformer.sequence_parallel:
                part = gather_from_sequence_parallel_region(part)
            tokens = self._layout.unpack(part.transpose(0, 1), ranks)  # collective: every rank takes part
            if is_first:
                kept.setdefault(stage, []).append(tokens if tokens.shape[1] > 1 else tokens[:, 0])


class RecordedSteps:
    """Takes an engine's optimizer steps, in place of ``train_step``, and keeps the record of each."""

    def __init__(self, engine: MegatronEngine):
        self._engine, self._train_step = engine, engine.train_step
        self.records: list[Record] = []

    def __call__(self, shard: Shard, loss_fn: LossFn, denominator: float) -> StepResult:
        recorder = StateRecorder(self._engine)
        with recorder.recording() as record:
            result = self._train_step(shard, recorder.watch(loss_fn), denominator)
        self.records.append(record.join())
        return result


def begin_records(engine: MegatronEngine) -> None:
    """Record every optimizer step from now on, until ``take_records``."""
    engine.__dict__["train_step"] = RecordedSteps(engine)


def take_records(engine: MegatronEngine) -> list[Record]:
    """Stop recording, and return the records of the optimizer steps since ``begin_records``."""
    return engine.__dict__.pop("train_step").records


def digest_weights(engine: MegatronEngine) -> dict[str, int]:
    """Digest every weight in its own type: HF name -> digest, on the first replica's leader; empty elsewhere."""
    plan, digests = DigestPlan(engine.config.dtype), {}
    for _ in plan.digest(engine.export_weights(), digests):
        pass
    return digests


# -- rounding


def record_rounded(engine: MegatronEngine, shards: list[Shard], loss: LossFn, dtype: str, seed: int) -> Record:
    """Record a forward pass in which each module rounds otherwise: its outputs are moved by up to one unit in their
    last place, at random. Its distance from a pass without that is what rounding alone does to this model.

    Args:
        shards: the shard of each replica. dtype: name of the type whose unit in the last place is taken.
    """
    recorder, shard = StateRecorder(engine), shards[engine.dp_rank]
    with recorder.recording() as record, rounding_otherwise(engine.device, dtype, seed):
        record.outputs = engine.forward(shard)
    if record.outputs is not None:
        real = shard.micro_batches()[: len(shard.counts)]
        starts = np.cumsum([0, *(micro.num_tokens for micro in real)])
        for start, stop, micro in zip(starts, starts[1:], real, strict=False):
            part = change_columns(record.outputs, lambda _, column, own=slice(start, stop): column[own])
            recorder.keep_slopes(loss, part, micro)
    return record.join()
