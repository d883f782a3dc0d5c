"""Experts in a training engine: which tokens routers see, experts that are replayed, biases that move after a step."""

from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from engines.batch.shard import Shard
from engines.megatron.extensions.extension import Extension, ForwardPass, Stage
from hardware.megatron.experts import Routers


class ExpertRouting(Extension):
    """The routers of a stage, as an engine runs them.

    Attributes:
        routers: they themselves; a stage may have none.
    """

    def __init__(self, stage: Stage):
        self.routers = Routers(stage.module, stage.transformer, stage.device)
        self._stage = stage
        self._tp_rank = mpu.get_tensor_model_parallel_rank() if stage.transformer.sequence_parallel else 0
        self._first_layer = get_transformer_layer_offset(stage.transformer)
        self._layers = get_num_layers_to_build(stage.transformer)

    def start_step(self, shard: Shard, step_tokens: int) -> None:
        computed = torch.tensor(shard.count_computed(), device=self._stage.device)
        dist.all_reduce(computed, group=mpu.get_data_parallel_group())
        self.routers.start_step(step_tokens / int(computed))

    def prepare(self, forward: ForwardPass) -> ForwardPass:
        """Tell the layers which slots hold tokens, and the experts of these where they are replayed.

        Tokens of a dummy reach no expert: they would be counted, and keep experts busy for nothing.
        """
        layout, routes = forward.layout, forward.micro.routes
        slots = layout.list_filled(self._tp_rank, self._stage.config.tp)
        if forward.is_dummy:
            slots = slots[:0]
        if routes is not None:
            slots = self._join_routes(layout.pack(routes[:, self._first_layer :][:, : self._layers]), slots)
        return replace(forward, keywords={**forward.keywords, "padding_mask": slots})

    def _join_routes(self, routes: Tensor, slots: Tensor) -> Tensor:
        """Join slots with the experts of the tokens there, which are ``[b, s, layers, k]`` of all slots."""
        own = routes.transpose(0, 1).chunk(self._stage.config.tp)[self._tp_rank]  # [s / tp, b, layers, k]
        return self.routers.join_routes(slots, own.flatten(0, 1).index_select(0, slots))

    def finish_step(self) -> None:
        if rate := self._stage.config.router_bias_rate:
            self.routers.move_biases(rate)

    def measure(self) -> dict[str, float]:
        return self.routers.measure()
