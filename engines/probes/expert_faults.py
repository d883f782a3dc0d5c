"""Known faults in mixtures of experts: their weights, the choice among them, and its gradient."""

from collections.abc import Callable

from torch import Tensor

from hardware.attention.cell import Patch


def swap_gate_and_up() -> list[Patch]:
    """Take the gate of every expert for its up projection, and the other way round."""
    from hardware.megatron.experts import GroupedExperts

    def wrap(forward):
        def compute_swapped(self, *args):
            own = self.weight1.data.clone()
            self.weight1.data.copy_(own.flip(1))
            try:
                return forward(self, *args)
            finally:
                self.weight1.data.copy_(own)

        return compute_swapped

    return [(GroupedExperts, "forward", wrap)]


def take_the_next_expert() -> list[Patch]:
    """Send each token to the experts behind its own, as ranks in another order would."""
    return _choose_otherwise(lambda router, x, weights, numbers: (weights, (numbers + 1) % len(router.weight)))


def leave_weights_unscaled() -> list[Patch]:
    """Weigh experts by their share of all scores, where the model scales those of the chosen to add up to 1."""

    def take_scores(router, x: Tensor, weights: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        return (x.float() @ router.weight.float().T).softmax(dim=-1).gather(1, numbers), numbers

    return _choose_otherwise(take_scores)


def drop_the_last_choice() -> list[Patch]:
    """Drop the least of a token's experts, as a limit on the tokens of an expert does."""
    return _choose_otherwise(lambda router, x, weights, numbers: (weights * (weights > weights[:, -1:]), numbers))


def lose_the_routers_gradient() -> list[Patch]:
    """Weigh experts by numbers that hand no gradient on to the router."""
    return _choose_otherwise(lambda router, x, weights, numbers: (weights.detach() + 0 * weights, numbers))


def _choose_otherwise(change: Callable[..., tuple[Tensor, Tensor]]) -> list[Patch]:
    from hardware.megatron.experts import Router

    def wrap(forward):
        return lambda self, x, *routes: change(self, x, *forward(self, x, *routes))

    return [(Router, "forward", wrap)]
