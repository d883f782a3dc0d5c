"""Known faults in mixtures of experts: their weights, the choice among them, its replay, and gradients."""

from collections.abc import Callable

from torch import Tensor

from hardware.attention.cell import Patch
from hardware.megatron.form import NO_ROUTE

# -- weights of experts


def swap_gate_and_up() -> list[Patch]:
    """Take the gate of every expert for its up projection, and the other way round."""
    return _compute_by(lambda experts, own: own.flip(1))


def cut_gate_and_up_as_one() -> list[Patch]:
    """Cut gate and up of every expert over ranks as one matrix: one rank has the gates, the other what they scale."""
    import torch
    import torch.distributed as dist

    def cut(experts, own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(experts.etp.size())]
        dist.all_gather(parts, own, group=experts.etp)
        rows = torch.cat(parts, dim=2).flatten(1, 2)  # [experts, 2 f, h]
        return rows.chunk(len(parts), dim=1)[experts.etp.rank()].unflatten(1, (2, -1))

    return _compute_by(cut)


def _compute_by(change: Callable[..., Tensor]) -> list[Patch]:
    """Compute experts by ``change(experts, weight1)`` in the place of gate and up."""
    from hardware.megatron.experts import GroupedExperts

    def wrap(forward):
        def compute_changed(self, *args):
            own = self.weight1.data.clone()
            self.weight1.data.copy_(change(self, own))
            try:
                return forward(self, *args)
            finally:
                self.weight1.data.copy_(own)

        return compute_changed

    return [(GroupedExperts, "forward", wrap)]


def exchange_fused_gates() -> list[Patch]:
    """Export fused experts with the rows of their up projections above those of their gates."""
    from engines.models.families.experts._joins import FusedExperts

    def wrap(split):
        def split_exchanged(self, whole, shapes):
            return split(self, whole.flip(1) if self.projections == 2 else whole, shapes)

        return split_exchanged

    return [(FusedExperts, "split", wrap)]


SHARED: dict[str, Callable[..., Tensor]] = {
    "a shared expert left out": lambda shared, hidden: hidden.new_zeros(hidden.shape),
    "a shared expert without its gate": lambda shared, hidden: shared.mlp(hidden)[0],
}
"""Name of a fault -> the output of a shared expert in place of its own."""


def share_otherwise(forward: Callable[..., Tensor]) -> list[Patch]:
    """Let the expert that every token goes through compute ``forward``."""
    from hardware.megatron.experts import SharedExpert

    return [(SharedExpert, "forward", lambda _: forward)]


# -- the choice

CHOICES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    # As ranks in another order would.
    "the next expert": lambda router, x, weights, numbers: (weights, (numbers + 1) % len(router.weight)),
    # Their share of all scores, where the model scales those of the chosen to add up to 1.
    "chosen experts' weights not scaled": lambda router, x, weights, numbers: (
        (x.float() @ router.weight.float().T).softmax(dim=-1).gather(1, numbers),
        numbers,
    ),
    # As a limit on the tokens of an expert does.
    "the last chosen expert dropped": lambda router, x, weights, numbers: (
        weights * (weights > weights[:, -1:]),
        numbers,
    ),
}
"""Name of a fault -> weights and numbers of a token's experts in place of its own, ``[n, k]`` both."""


def choose_without_bias() -> list[Patch]:
    """Choose experts by their scores alone, where the model adds a bias to each."""
    from hardware.megatron.experts import Router

    return [(Router, "_choose", lambda choose: lambda self, scores: choose(self, scores - self.bias))]


def route_padding() -> list[Patch]:
    """Send slots without a token to experts too, and tokens of dummies, which changes no logprob."""
    from hardware.megatron.experts import ExpertLayer

    def wrap(forward):
        return lambda self, hidden, padding_mask=None, **further: forward(self, hidden, **further)

    return [(ExpertLayer, "forward", wrap)]


def choose_otherwise(change: Callable[..., tuple[Tensor, Tensor]]) -> list[Patch]:
    """Let ``change(router, x, weights, numbers)`` choose the experts of each token."""
    from hardware.megatron.experts import Router

    def wrap(forward):
        return lambda self, x, *routes: change(self, x, *forward(self, x, *routes))

    return [(Router, "forward", wrap)]


# -- replay


def shift_routes(axis: int) -> list[Patch]:
    """Replay the experts of the token before, on axis 0, or of the layer before, on axis 1."""
    from hardware.megatron.experts import Routers

    def wrap(join):
        return staticmethod(lambda slots, routes: join(slots, routes.roll(1, axis)))

    return [(Routers, "join_routes", wrap)]


def forget_routes_of_prompts() -> list[Patch]:
    """Return experts of a prompt's last token alone, as of a cached prompt: the trainer then chooses by itself."""
    from engines.vllm import engine

    def wrap(cut):
        def cut_computed(completion, prompt: int, routes):
            found = cut(completion, prompt, routes)
            found.routes[: prompt - 1] = NO_ROUTE
            return found

        return cut_computed

    return [(engine, "cut_routes", wrap)]


# -- gradients


def lose_the_routers_gradient() -> list[Patch]:
    """Weigh experts by numbers that hand no gradient on to the router."""
    return choose_otherwise(lambda router, x, weights, numbers: (weights.detach() + 0 * weights, numbers))


def sum_over_all_ranks() -> list[Patch]:
    """Sum gradients of experts over the ranks that share all other parameters, which hold other experts."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import DistributedDataParallel

    def wrap(finish):
        def sum_all(self, *args, **settings):
            finish(self, *args, **settings)
            for buffer in self.expert_parallel_buffers:
                dist.all_reduce(buffer.grad_data, group=mpu.get_data_parallel_group(with_context_parallel=True))

        return sum_all

    return [(DistributedDataParallel, "finish_grad_sync", wrap)]
