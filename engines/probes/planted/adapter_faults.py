"""Known faults of low-rank adapters."""

from hardware.attention.cell import Patch


def send_frozen_weights() -> list[Patch]:
    """Send the weights that adapters are beside, without these (verl#7495)."""
    from engines.megatron.extensions.adapters import Adapters

    return [(Adapters, "merge", lambda _: lambda self, parameter: parameter.data)]


def leave_unscaled() -> list[Patch]:
    """Add the adapters' product as it is."""
    from hardware.megatron.adapters import LinearAdapter

    def wrap(forward):
        return lambda self, x, y: y + (forward(self, x, y) - y) / self.scale

    return [(LinearAdapter, "forward", wrap)]


def take_the_a_of_a_neighbour() -> list[Patch]:
    """Multiply the B of queries, keys and values, or of gate and up projection, with the A of one another."""
    from hardware.megatron.adapters import LinearAdapter

    def wrap(spread):
        return lambda self: spread(self).roll(self.b.shape[1], 1)

    return [(LinearAdapter, "spread", wrap)]
