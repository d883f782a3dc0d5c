"""The training engine: one rank of a Megatron model that computes, learns and exports its weights."""

import contextlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.profiler import record_function

from engines.batch.batch import TrainBatch
from engines.batch.shard import Outputs, Shard, TokenOutputs, ValueOutputs, change_columns, join_outputs, list_columns
from engines.config import MegatronConfig
from engines.interfaces import LossFn, OffloadPart, StepResult
from engines.megatron.checkpoint import load_checkpoint, save_checkpoint
from engines.megatron.extensions.extension import Extensions, ForwardPass, Stage
from engines.megatron.layout import Layout
from engines.megatron.logprobs import score_tokens
from engines.megatron.memory.parts import DeviceParts, import_offload
from engines.megatron.model import FrozenModel, build_model, build_transformer_config, choose_learning
from engines.megatron.optimizer import build_optimizer
from engines.megatron.rotary import Rotary
from engines.megatron.weights import export_weights
from engines.models.spec import ModelSpec
from hardware.attention.mask_spec import Sharing
from hardware.platform import Platform


class MegatronEngine:
    """One rank of a training engine. Every method is collective over all of its ranks.

    Args:
        model: spec of the model; weights are read from ``model.folder``. Its head decides the type of the outputs.
        temperature: divides the logits before logprobs and entropy, as the sampler does.
        trainable: False builds neither gradients nor an optimizer (a reference model).
        cpu_offload: offload frozen weights to the host; they are on the device only during a forward pass.
        base: engine of the same folder, both with adapters; its frozen weights are this one's, and it moves them.
    """

    def __init__(
        self,
        model: ModelSpec,
        config: MegatronConfig,
        platform: Platform,
        device: torch.device,
        *,
        temperature: float = 1.0,
        trainable: bool = True,
        cpu_offload: bool = False,
        base: "MegatronEngine | None" = None,
    ):
        self.model, self.config, self.platform, self.device = model, config, platform, device
        self.temperature, self.banned, self.pad_id = temperature, model.banned_tokens, 0  # any id pads: nothing sees it
        self.dp_rank, self.dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        self.is_leader = (
            mpu.get_tensor_model_parallel_rank() == 0
            and mpu.get_context_parallel_rank() == 0
            and mpu.is_pipeline_last_stage()
        )
        self.transformer = build_transformer_config(model, config)
        self.rotary = Rotary(model, device)
        self.decoder = module = build_model(model, self.transformer, platform, device, base and base.decoder)
        stage = Stage(model=model, config=config, module=module, transformer=self.transformer, device=device)
        self.extensions = Extensions.build(stage)
        choose_learning(module, model, config, trainable)
        # fp32 gradients, because a bf16 sum over micro-batches loses small terms.
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        wrapped = DistributedDataParallel(self.transformer, ddp, module) if trainable else FrozenModel(module)
        learner = build_optimizer(wrapped, config) if trainable else (None, None)
        # Typed as in an engine that learns; of other engines only attributes that a plain module has are read.
        self.module = cast(DistributedDataParallel, wrapped)
        self.optimizer, self.schedule = cast(tuple[MegatronOptimizer, OptimizerParamScheduler], learner)
        self.weights_on_device = contextlib.nullcontext()
        if cpu_offload:
            self.weights_on_device = import_offload().OffloadedWeights(module)
        self.device_parts = DeviceParts(wrapped, learner[0], device, cpu_offload, base and base.device_parts)

    # -- forward and backward

    def forward(self, shard: Shard, raw: bool = False, every: bool = False) -> Outputs | None:
        """Compute outputs ``[N]`` of a shard without gradients, as ``TrainEngine`` says; None where it is no leader."""
        parts: list[Outputs] = []

        def keep(outputs: Outputs, *_):
            parts.append(outputs)
            return torch.zeros(()), torch.tensor(0), {}

        self.device_parts.require("forward", "weights")
        self._check_schedule(shard)
        self.module.eval()
        own = self.temperature, self.banned
        self.temperature, self.banned = (1.0, ()) if raw else own
        try:
            with torch.no_grad(), self.weights_on_device:
                self.run(shard, keep, forward_only=True, every=every)
        finally:
            self.temperature, self.banned = own
        return self._collect_outputs(shard, parts)

    def train_step(self, shard: Shard, loss_fn: LossFn, denominator: float) -> StepResult:
        """Take an optimizer step on ``sum(loss) / denominator``; none where a gradient is not finite on some rank."""
        metrics, parts = self.backward(shard, loss_fn, denominator)
        grad_norm = float("nan")
        if self._are_gradients_finite():
            # Before the step: the first of n warm-up steps then uses 1/n of the peak rate instead of none of it.
            self.schedule.step(increment=1)
            with record_function("optimizer_step"):
                _, grad_norm, _ = cast(tuple, self.optimizer.step())
            self.extensions.finish_step()
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        measured = self.extensions.measure()
        return StepResult(_reduce(metrics), self._collect_outputs(shard, parts), float(grad_norm), lr, measured)

    def _collect_outputs(self, shard: Shard, parts: list[Outputs]) -> Outputs | None:
        """Join the outputs of the real micro-batches to ``[N]``; dummy micro-batches come last and are left out.

        They are copied to the host's memory: the process that receives them may have no such device.
        """
        if not self.is_leader:
            return None
        return change_columns(join_outputs(parts), lambda _, column: column[: shard.num_tokens].cpu())

    def backward(self, shard: Shard, loss_fn: LossFn, denominator: float) -> tuple[list[dict], list[Outputs]]:
        """Add gradients of ``sum(loss) / denominator`` into the buffers; metrics and outputs of each micro-batch."""
        self.device_parts.require("backward", "weights", "gradients", "optimizer")
        self._check_schedule(shard)
        step_tokens = self._sum_over_replicas(shard.num_tokens)
        parts: list[Outputs] = []

        def loss_of(outputs: Outputs, layout: Layout, micro: TrainBatch, is_dummy: bool):
            # Nobody but the loss reads the [N, k + 1] column.
            kept = replace(outputs, top_logprobs=None) if isinstance(outputs, TokenOutputs) else outputs
            parts.append(change_columns(kept, lambda _, column: column.detach()))
            loss, metrics = loss_fn(outputs, micro)
            if is_dummy:  # a graph to go back through, and nothing else
                loss = sum(0 * column.sum() for column in list_columns(outputs).values())
                metrics = {name: torch.zeros_like(value) for name, value in metrics.items()}
            # Megatron divides by the step's tokens after all micro-batches, which leaves sum / denominator.
            scaled = loss * (step_tokens / denominator)
            return scaled, torch.tensor(0 if is_dummy else layout.num_valid, dtype=torch.int), metrics

        self.module.train()
        self.extensions.start_step(shard, step_tokens)
        self.module.zero_grad_buffer()
        self.optimizer.zero_grad()
        return self.run(shard, loss_of, forward_only=False), parts

    def _are_gradients_finite(self) -> bool:
        """Tell whether all gradients are finite, with the same answer on every rank: one that steps while another does
        not would never be found again."""
        # A list in Megatron's class, a method in torch's that it inherits from.
        buffers = [*cast(list, self.module.buffers), *self.module.expert_parallel_buffers]
        ends = [torch.stack(buffer.grad_data.aminmax()) for buffer in buffers]  # a NaN comes through
        finite = torch.cat(ends).isfinite().all().int()
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        return bool(finite)

    def run(self, shard: Shard, loss_of, forward_only: bool, every: bool = False) -> list[dict]:
        """Run every micro-batch through Megatron's schedule; the metrics of each, on the last stage.

        Args:
            loss_of: ``loss_of(outputs, layout, micro-batch, whether it is a dummy) -> (loss, tokens, metrics)``, the
                tokens being those of this context-parallel rank.
            every: scores are computed of all targets, and not of those alone that count.
        """
        micro_batches, sharing = shard.micro_batches(), shard.list_sharing()
        scored = [None] * len(micro_batches) if every else shard.find_scored()  # while all is on the host

        def forward_step(micro_batches: Iterator[tuple[int, TrainBatch]], module):
            number, micro = next(micro_batches)
            micro, is_dummy = micro.to(self.device), number >= len(shard.counts)
            layout = self.layout(micro.lengths, sharing[number], scored[number])
            output = self.forward_micro_batch(module, micro, layout, is_dummy)
            return output, lambda hidden: loss_of(self.outputs(hidden, micro, layout), layout, micro, is_dummy)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=enumerate(micro_batches),
            model=self.module,
            num_microbatches=len(micro_batches),
            seq_length=1,  # both sizes are unused: stages exchange real shapes (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def layout(
        self, lengths: tuple[int, ...], sharing: Sharing | None = None, scored: np.ndarray | None = None
    ) -> Layout:
        """Lay out a micro-batch of sequences with ``lengths`` tokens on this rank, as ``Layout.build`` does."""
        cp_rank, config = mpu.get_context_parallel_rank(), self.config
        found = {"sharing": sharing, "scored": scored}
        sizes = dict(tp=config.tp, cp=config.cp, cp_rank=cp_rank, multiple=config.pad_to_multiple_of)
        return Layout.build(lengths, config.layout, **sizes, slots=config.slots, **found, device=self.device)

    @record_function("forward_micro_batch")
    def forward_micro_batch(self, module, micro: TrainBatch, layout: Layout, is_dummy: bool = False) -> Tensor:
        """Run this stage on a micro-batch ``[N]``: hidden states ``[s / tp, b, h]``, for the next stage or the head."""
        rotary = self.rotary(layout.pack(micro.positions), self.transformer.params_dtype)
        spec = layout.build_mask_spec(self.model.rules, micro.image_block)
        forward = ForwardPass(
            micro=micro,
            layout=layout,
            is_dummy=is_dummy,
            ids=layout.pack(micro.inputs, fill=self.pad_id),
            inputs=self.platform.build_attention_inputs(spec, rotary, self.config.attention_override),
        )
        forward = self.extensions.prepare(forward)
        inputs = forward.inputs
        with self.platform.wrap_forward(inputs):
            return module(
                forward.ids,
                None,
                inputs.attention_mask,
                forward.embedded,
                packed_seq_params=inputs,
                **forward.keywords,
            )

    @record_function("outputs")
    def outputs(self, hidden: Tensor, micro: TrainBatch, layout: Layout) -> Outputs:
        """Compute outputs ``[N]`` of a whole micro-batch from last hidden states ``[s / tp, b, h]``, on every rank."""
        module, ranks = self.decoder, mpu.get_context_parallel_group()
        if self.model.head == "value":
            return ValueOutputs(layout.unpack(module.output_layer(hidden).transpose(0, 1), ranks))
        if self.transformer.sequence_parallel:  # the output layer, which is cut over the vocabulary, takes all slots
            hidden = gather_from_sequence_parallel_region(hidden)
        layout = layout.narrow()
        support, top_ids = (
            None if column is None else layout.gather_tokens(column)
            for column in (micro.support, micro.rollout_top_ids)
        )
        hidden = layout.gather_slots(hidden.transpose(0, 1))  # that of all slots is freed
        kernels = self.platform.kernel_memory
        scores = score_tokens(
            hidden,
            module.output_weight,
            layout.gather_tokens(micro.targets),
            temperature=self.temperature,
            vocab=self.model.vocab,
            support=support,
            top_ids=top_ids,
            banned=self.banned,
            at_once=kernels.frozen_logits if self.extensions.freeze_head else kernels.head_logits,
            group=mpu.get_tensor_model_parallel_group(),
        )
        # Each by itself: the gradient of one that a loss leaves out is then known to be none without looking at it.
        return change_columns(scores, lambda _, column: layout.scatter_tokens(column, ranks))

    def _check_schedule(self, shard: Shard) -> None:
        """Check that all ranks have parts of one schedule; the first collective of a pass.

        Raises:
            RuntimeError: ranks were given parts of different schedules, or of another replica, with which they would
                wait for each other for ever or learn from something twice.
        """
        is_mine = shard.replica == self.dp_rank
        claim = torch.tensor([shard.digest, len(shard.counts) + shard.num_dummies, is_mine], device=self.device)
        claims = [torch.empty_like(claim) for _ in range(dist.get_world_size())]
        dist.all_gather(claims, claim)
        expected = torch.cat([claims[0][:2], claim.new_ones(1)])
        mismatched = [rank for rank, answer in enumerate(claims) if not torch.equal(answer, expected)]
        if mismatched:
            raise RuntimeError(
                f"schedule: ranks {mismatched} were given another plan of this batch than rank 0, or another replica's "
                "part; every rank must be called with its replica's shard of one plan_schedule, in the same order"
            )

    def _sum_over_replicas(self, value: int) -> int:
        total = torch.tensor(value, device=self.device)
        dist.all_reduce(total, group=mpu.get_data_parallel_group())
        return int(total)

    # -- weights

    def export_weights(self, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(HF name, full tensor)`` on the first replica's leader. Collective: run it to its end on all ranks.

        Only the first replica works, and the ranks that have parts of experts which it has not: the others hold the
        same weights. None of these yields anything. With ``everywhere`` all ranks yield all weights.
        """
        self.device_parts.require("export_weights", "weights")
        only_helps = not everywhere and bool(self.dp_rank or mpu.get_context_parallel_rank())
        # Of a stage's ranks the first replica has the first tp, and the same experts are ep x etp apart.
        if not everywhere and mpu.get_expert_data_parallel_rank() * self.config.ep * self.config.etp >= self.config.tp:
            return
        for name, tensor in export_weights(self.decoder, self.model, self.extensions.merge, only_helps):
            if self.is_leader or everywhere:
                yield name, tensor

    def save(self, folder: str) -> list[str]:
        """Save a checkpoint into an empty folder; returns the names of the files that this rank wrote."""
        self.device_parts.require("save", "weights", "optimizer")
        return save_checkpoint(folder, self.module, self.optimizer, self.schedule, self.extensions.learned)

    def load(self, folder: str) -> None:
        """Load a checkpoint, at the same or other parallel sizes.

        Raises:
            ValueError: the folder holds none.
        """
        self.device_parts.require("load", "weights", "optimizer")
        load_checkpoint(folder, self.module, self.optimizer, self.schedule, self.extensions.learned)

    def offload(self, parts: Sequence[OffloadPart]) -> None:
        """Move parts to the host's memory. Not collective."""
        self.device_parts.offload(parts)

    def onload(self, parts: Sequence[OffloadPart]) -> None:
        """Bring parts back onto the device. Not collective."""
        self.device_parts.onload(parts)


def _reduce(metrics: list[dict]) -> dict[str, float]:
    """Add metric sums over micro-batches; for metrics named ``*_max`` take the largest."""
    reduced: dict[str, float] = {}
    for part in metrics:
        for name, value in part.items():
            join = max if name.endswith("_max") else operator.add
            reduced[name] = join(reduced[name], float(value)) if name in reduced else float(value)
    return reduced
