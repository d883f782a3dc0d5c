"""Known faults of sequences that begin alike, under which the masks are still right."""

from dataclasses import replace

import numpy as np
import torch

from hardware.attention.cell import Patch
from hardware.attention.mask_spec import expand_counts


def count_own_positions_from_0() -> list[Patch]:
    """Rotate the tokens after a shared prompt as if they were the first of a sequence."""
    from engines.megatron.engine import MegatronEngine

    def wrap(forward):
        def run(self, module, micro, layout, *further):
            if layout.sharing:
                owner, within = expand_counts(np.asarray(micro.lengths))
                begins = np.asarray(layout.sharing.counts)[owner]
                moved = torch.from_numpy(np.where(within >= begins, begins, 0)).to(micro.positions.device)
                micro = replace(micro, positions=micro.positions - moved)
            return forward(self, module, micro, layout, *further)

        return run

    return [(MegatronEngine, "forward_micro_batch", wrap)]


def take_the_gradient_of_one_reader() -> list[Patch]:
    """Give a slot that several tokens read the gradient of the last of them alone, not the sum of all."""
    from engines.megatron.layout import Layout

    def wrap(gather):
        def read(self, local):
            rows, places = gather(self, local), torch.arange(len(self.slots), device=local.device)
            last = places.new_zeros(local.shape[0] * local.shape[1]).scatter_reduce(0, self.slots, places, "amax")
            return torch.where((last[self.slots] == places)[:, None], rows, rows.detach())

        return read

    return [(Layout, "gather_slots", wrap)]


def score_one_target_for_all() -> list[Patch]:
    """Score the first target of one sample for all samples of its prompt."""
    from engines.megatron.engine import MegatronEngine

    def wrap(outputs):
        def score(self, hidden, micro, layout):
            return outputs(self, hidden, replace(micro, targets=layout.unpack(layout.pack(micro.targets))), layout)

        return score

    return [(MegatronEngine, "outputs", wrap)]
