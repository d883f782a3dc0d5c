"""A mixture of experts in the place of a layer's MLP: its router, the way of tokens to experts, grouped products.

One grouped matrix product of torch computes all experts of a rank, on a CPU and on CUDA alike; an NPU has an operator
of its own. Megatron-core 0.16.1 needs TransformerEngine or grouped_gemm for that, its dispatcher needs CUDA streams,
and it routes padding as well.
"""

from collections.abc import Sequence
from copy import copy
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.distributed import ProcessGroup  # pyright: ignore[reportPrivateImportUsage]  as documented

from hardware.megatron.form import NO_ROUTE
from hardware.megatron.marks import mark_experts, mark_sequence_parallel
from hardware.megatron.mixture import Experts
from hardware.megatron.router_losses import AddedLoss, sum_balance_loss, sum_z_loss

_LEAST_SUM = 1e-20
"""Added to the sum by which weights are divided: sigmoids of very small logits may all be 0."""


class Router(torch.nn.Module):
    """Chooses the experts of each token by their scores, in fp32. ``weight`` is ``[experts, h]``.

    A pass with a gradient adds the router's losses to those of the optimizer step: means over the tokens that the
    router sees in the step, times ``moe_aux_loss_coeff`` and ``moe_z_loss_coeff`` of Megatron's configuration.

    Attributes:
        load: ``[experts]`` long, tokens of this rank that chose each expert, over all passes with a gradient.
        losses: ``[2]`` float32, the auxiliary and the z-loss over those passes, as sums over this rank's tokens.
        bias: ``[experts]`` float32 at every dtype of the model, added to the scores for the choice alone; None without.
    """

    load: Tensor
    losses: Tensor
    bias: Tensor | None

    def __init__(self, config, experts: Experts):
        super().__init__()
        self.register_buffer("load", torch.zeros(experts.count, dtype=torch.long), persistent=False)
        self.register_buffer("losses", torch.zeros(2), persistent=False)
        self.weight = torch.nn.Parameter(torch.empty(experts.count, config.hidden_size, dtype=config.params_dtype))
        mark_sequence_parallel([self.weight], config)
        self.register_buffer("bias", torch.zeros(experts.count, dtype=torch.float32) if experts.has_bias else None)
        self.mixture = experts
        self.balance, self.z = config.moe_aux_loss_coeff, config.moe_z_loss_coeff or 0.0
        self._scale = 1.0

    def start_step(self, scale: float) -> None:
        """Forget the load and the losses of the step before.

        Args:
            scale: tokens by which the loss of the step is divided, over tokens that the router will see. Samples of a
                prompt share its tokens here, and each has them there.
        """
        self._scale = scale
        self.load.zero_()
        self.losses.zero_()

    def forward(self, x: Tensor, routes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Choose experts for tokens ``[n, h]``: their weights ``[n, k]`` float32, and their numbers ``[n, k]``.

        Args:
            routes: ``[n, k]``, experts to take instead, with the scores of these weights; ``NO_ROUTE`` for none.
        """
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.softmax(dim=-1) if self.mixture.score == "softmax" else logits.sigmoid()
        numbers = self._choose(scores.detach())
        if routes is not None:
            numbers = torch.where(routes == NO_ROUTE, numbers, routes)
        weights = scores.gather(1, numbers)
        if self.mixture.is_normed:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _LEAST_SUM)
        weights = weights * self.mixture.scale if self.mixture.scale != 1 else weights
        if torch.is_grad_enabled():  # of a layer that is recomputed, the first pass has no gradient
            counts = torch.zeros_like(self.load).scatter_add_(0, numbers.flatten(), torch.ones_like(numbers.flatten()))
            self.load += counts
            if self.balance or self.z:
                weights = self._add_losses(weights, logits, scores, counts)
        return weights, numbers

    def _choose(self, scores: Tensor) -> Tensor:
        """Choose experts by their scores ``[n, experts]``: numbers ``[n, k]``, as in DeepSeek-V3 (arXiv:2412.19437)."""
        if self.bias is not None:
            scores = scores + self.bias
        if self.mixture.open_groups < self.mixture.groups:
            grouped = scores.unflatten(1, (self.mixture.groups, -1))  # [n, groups, experts of a group]
            best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(self.mixture.open_groups, dim=-1).indices
            is_shut = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
            scores = grouped.masked_fill(is_shut[..., None], -torch.inf).flatten(1)
        return scores.topk(self.mixture.chosen, dim=-1).indices

    def _add_losses(self, weights: Tensor, logits: Tensor, scores: Tensor, counts: Tensor) -> Tensor:
        """Add the losses as sums over tokens, which Megatron divides as it divides all of the loss."""
        balance = z = logits.new_zeros(())
        if self.balance:
            # Replicas have equally many micro-batches: what they compute at once is one, whatever their number.
            dist.all_reduce(counts, group=mpu.get_tensor_and_data_parallel_group(with_context_parallel=True))
            shares = scores / (scores.sum(dim=-1, keepdim=True) + _LEAST_SUM)  # of sigmoids; those of a softmax add up
            balance = sum_balance_loss(shares, counts, self.mixture.chosen)
        if self.z:
            z = sum_z_loss(logits)
        self.losses += torch.stack([balance, z]).detach()
        return cast(Tensor, AddedLoss.apply(weights, self._scale * (self.balance * balance + self.z * z)))


class Routers:
    """The routers of the layers of this pipeline stage.

    Args:
        module: the stage. config: Megatron's, as the routers have it.

    Attributes:
        layers: the routers in the order of the layers; there may be none.
    """

    def __init__(self, module: torch.nn.Module, config, device: torch.device):
        self.layers = [part for part in module.modules() if isinstance(part, Router)]
        self._config, self._device = config, device

    def start_step(self, scale: float) -> None:
        """Begin a step in every router."""
        for router in self.layers:
            router.start_step(scale)

    @staticmethod
    def join_routes(slots: Tensor, routes: Tensor) -> Tensor:
        """Join what ``ExpertLayer`` takes to one tensor, as Megatron hands it on: ``[m, 1 + layers * k]`` int32.

        Args:
            slots: ``[m]``, as ``ExpertLayer`` takes them. routes: ``[m, layers, k]`` int16, experts of the tokens there
                in each layer of this pipeline stage; ``NO_ROUTE`` where the router chooses.
        """
        return torch.cat([slots[:, None], routes.flatten(1)], dim=1).int()

    def measure(self) -> dict[str, float]:
        """Measure what the routers of all stages did since the step began, as metrics. Collective over all ranks.

        They are the smallest and the largest load of an expert: its tokens, divided by the mean of its layer's experts;
        and of the losses that have a coefficient, without it, the mean over layers and tokens.
        """
        ends, sums = torch.full((2,), -torch.inf, device=self._device), torch.zeros(3, device=self._device)
        if self.layers:
            tokens = sum_load(self.layers)
            loads = tokens.float() * tokens.shape[1] / tokens.sum(dim=1, keepdim=True).clamp(min=1)
            ends = torch.stack([-loads.amin(), loads.amax()])
            sums[:2] = torch.stack([router.losses for router in self.layers]).sum(dim=0)
            sums[2] = sum(router.load.sum() / router.mixture.chosen for router in self.layers)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        dist.all_reduce(sums)
        smallest, largest, balance, z, tokens = torch.cat([ends, sums]).tolist()  # one read of the device
        found = {"expert_load_min": -smallest, "expert_load_max": largest}
        found |= {"router_aux_loss": balance / max(tokens, 1.0)} if self._config.moe_aux_loss_coeff else {}
        return found | ({"router_z_loss": z / max(tokens, 1.0)} if self._config.moe_z_loss_coeff else {})

    def move_biases(self, rate: float) -> None:
        """Move the bias of each expert by ``rate``: up where its load is below the mean of its layer, down where above
        (Wang et al., arXiv:2408.15664). Collective over the ranks of a pipeline stage."""
        moved = [router for router in self.layers if router.bias is not None]
        for router, tokens in zip(moved, sum_load(moved).float() if moved else (), strict=True):
            cast(Tensor, router.bias).add_((tokens.mean() - tokens).sign(), alpha=rate)


def sum_load(routers: Sequence[Router]) -> Tensor:
    """Sum the load of a step over the ranks of a pipeline stage: ``[layers, experts]`` long. Collective over them."""
    tokens = torch.stack([router.load for router in routers])
    # Each rank of a stage has tokens of its own: tensor-parallel ranks have parts of the sequences.
    dist.all_reduce(tokens, group=mpu.get_tensor_and_data_parallel_group(with_context_parallel=True))
    return tokens


class GroupedExperts(MegatronModule):
    """This rank's experts. ``weight1 [experts, 2, f, h]`` has gate and up, ``weight2 [experts, h, f]`` down.

    The width f is that of an expert's part on this rank. Rows of 16-bit numbers must be whole multiples of 16 bytes,
    which torch asks for.
    """

    def __init__(self, config, experts: Experts):
        super().__init__(config)
        groups = mpu.get_expert_model_parallel_group(), mpu.get_expert_tensor_parallel_group()
        self.ep, self.etp = cast(tuple[ProcessGroup, ProcessGroup], groups)
        self.count, ffn = experts.count // self.ep.size(), experts.ffn // self.etp.size()
        make = lambda *shape: torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))  # noqa: E731
        self.weight1 = make(self.count, 2, ffn, config.hidden_size)
        self.weight2 = make(self.count, config.hidden_size, ffn)
        mark_experts([self.weight1, self.weight2], cut_dim=2)

    def forward(self, x: Tensor, weights: Tensor, numbers: Tensor) -> Tensor:
        """Compute the experts' outputs ``[n, h]``, each times its weight; partial sums over the ranks of an expert.

        Args:
            x: ``[n, h]``, a row for each token and expert, expert by expert. weights: ``[n]``. numbers: ``[n]``, of
                this rank's experts.
        """
        own = torch.arange(self.count, device=numbers.device)
        ends = torch.searchsorted(numbers, own, right=True, out_int32=True)
        gate, up = self.multiply(x, self.weight1.flatten(1, 2), ends).chunk(2, dim=-1)
        inner = (self.config.activation_func(gate) * up * weights[:, None]).to(x.dtype)
        return self.multiply(inner, self.weight2, ends)

    @staticmethod
    def multiply(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """Multiply each expert's rows of ``x`` by its weight; a platform with an operator for it overrides this.

        Args:
            x: ``[n, i]``, expert by expert. weight: ``[experts, o, i]``. ends: ``[experts]`` int32, where the rows of
                each expert end.

        Returns:
            ``[n, o]``.
        """
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Name both weights for a checkpoint, as whole tensors that are cut by expert and by width."""
        ahead, replica = len(sharded_offsets), (0, 0, mpu.get_expert_data_parallel_rank())
        cuts = [(axis + ahead, group.rank(), group.size()) for axis, group in ((0, self.ep), (2, self.etp))]
        return {
            # The parameter itself: the optimizer finds its state by it.
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}", parameter, *sharded_offsets, *cuts, replica_id=replica, prepend_axis_num=ahead
            )
            for name, parameter in self.named_parameters()
        }


class SharedExpert(MegatronModule):
    """An MLP that every token x goes through. With a gate its output is multiplied by ``sigmoid(gate_weight x)``, where
    ``gate_weight`` is ``[1, h]``."""

    def __init__(self, config, mlp: ModuleSpec, has_gate: bool):
        super().__init__(config)
        self.gate_weight = None
        if has_gate:
            self.gate_weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
            mark_sequence_parallel([self.gate_weight], config)
        self.mlp = build_module(mlp, config=config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute ``[s, b, h] -> [s, b, h]``."""
        found = self.mlp(hidden)[0]
        return found if self.gate_weight is None else F.linear(hidden, self.gate_weight).sigmoid() * found


class ExpertLayer(MegatronModule):
    """A layer of experts: the router, the experts of this rank, and a shared expert where there is one.

    Args:
        mlp: spec of an MLP, whose width the shared expert has of its own.
        grouped_experts: the platform's module of a rank's experts.
    """

    def __init__(
        self, config, experts: Experts, mlp: ModuleSpec, grouped_experts: type[GroupedExperts] = GroupedExperts
    ):
        super().__init__(config)
        self.router, self.experts = Router(config, experts), grouped_experts(config, experts)
        self.place = 0
        self.group = cast(ProcessGroup, mpu.get_expert_tensor_and_model_parallel_group())
        own = copy(config)
        own.ffn_hidden_size = experts.shared  # Megatron's MLP reads it from here
        self.shared = SharedExpert(own, mlp, experts.gates_shared) if experts.shared else None

    def set_layer_number(self, number: int) -> None:
        """Take the layer's number in the whole model, from 1 on, as Megatron tells it."""
        self.place = number - 1 - get_transformer_layer_offset(self.config)

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None, **_) -> tuple[Tensor, None]:
        """Compute ``[s, b, h] -> ([s, b, h], None)``; the second is Megatron's place for a bias.

        Args:
            padding_mask: ``[m]`` long, the slots of ``[s * b]`` that hold a token, or these and the tokens' experts by
                ``Routers.join_routes``; None where all do. Megatron's name of the argument that it hands on to MLPs,
                through recomputation too. Slots without a token reach no expert of the router's, which leaves 0.
        """
        slots, routes, x = padding_mask, None, hidden.flatten(0, 1)
        if slots is not None and slots.dim() == 2:
            first = 1 + self.place * self.router.mixture.chosen
            slots, routes = slots[:, 0].long(), slots[:, first : first + self.router.mixture.chosen].long()
        found = self._route(x if slots is None else x.index_select(0, slots), routes)
        found = found if slots is None else torch.zeros_like(x).index_copy(0, slots, found)
        found = found.view_as(hidden)
        return (found + self.shared(hidden) if self.shared else found), None

    def _route(self, x: Tensor, routes: Tensor | None) -> Tensor:
        """Compute the weighted sum of each token's experts: ``[n, h] -> [n, h]``."""
        weights, numbers = self.router(x, routes)
        chosen = numbers.shape[1]
        numbers, order = numbers.flatten().sort(stable=True)  # [n * k], expert by expert
        rows, weights = x.index_select(0, order // chosen), weights.flatten().index_select(0, order)
        compute = self.experts if self.group.size() == 1 else self._exchange
        found = compute(rows, weights, numbers)
        return found.index_select(0, order.argsort()).unflatten(0, (len(x), chosen)).sum(dim=1)

    def _exchange(self, rows: Tensor, weights: Tensor, numbers: Tensor) -> Tensor:
        """Compute as ``GroupedExperts`` does, on the ranks that hold the experts: ``[n, h] -> [n, h]``.

        A row goes to every rank that holds a part of its expert, and the partial sums of them come back. The ranks of
        an expert are neighbours in the group.
        """
        ranks, parts, own = self.group.size(), self.experts.etp.size(), self.experts.count
        every = torch.arange(ranks // parts * own, device=numbers.device)
        ends = torch.searchsorted(numbers, every, right=True)
        sent = ends.diff(prepend=ends.new_zeros(1)).view(-1, own).repeat_interleave(parts, dim=0)  # [ranks, own] rows
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        to, back = torch.stack([sent.sum(dim=1), received.sum(dim=1)]).tolist()
        copy = lambda x: torch.cat([part for part in x.split(to[::parts]) for _ in range(parts)])  # noqa: E731
        arrived, weights = (all_to_all(self.group, copy(x) if parts > 1 else x, back, to) for x in (rows, weights))
        # They arrive rank by rank, and from each expert by expert.
        here = torch.arange(own, device=numbers.device).repeat(ranks)
        here, order = here.repeat_interleave(received.flatten(), output_size=sum(back)).sort(stable=True)
        found = self.experts(arrived.index_select(0, order), weights.index_select(0, order), here)
        found = all_to_all(self.group, found.index_select(0, order.argsort()), to, back)
        if parts == 1:
            return found
        found = found.split(to)
        return torch.cat([torch.stack(found[i : i + parts]).sum(dim=0) for i in range(0, ranks, parts)])
