"""A gated delta net (arXiv:2412.06464) in the place of Megatron's self-attention."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor

from hardware.attention.delta_rule import DeltaPlan, convolve
from hardware.attention.inputs import AttentionInputs
from hardware.collectives import gather_ranks
from hardware.megatron.marks import mark_sequence_parallel
from hardware.megatron.states.mixer import DeltaNet


class GatedDeltaNet(MegatronModule):
    """Mixes tokens ``[s / tp, b, h] -> [s / tp, b, h]`` by a convolution and a state for each value head.

    Columns of the input projection are those of one key head after another: its query, itself, the values of the value
    heads that share it, their two gates, and the gate of their output. So tensor parallelism cuts between key heads.
    Context-parallel ranks each compute the states of all tokens, and keep the outputs of their own.
    """

    def __init__(self, config, layer_number: int, mixer: DeltaNet, pg_collection: Any = None, **_):
        super().__init__(config=config)
        self.layer_number, self.net = layer_number, mixer  # counted from 1
        net = mixer
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.heads = net.key_heads // self.tp_group.size()
        width, dtype = net.key_heads * net.ratio * net.value_dim, config.params_dtype
        self.conv = _make_cut(torch.zeros(self.heads * net.convolved, 1, net.taps, dtype=dtype))
        self.a_log, self.dt_bias = (_make_cut(torch.zeros(self.heads * net.ratio, dtype=dtype)) for _ in range(2))
        self.out_norm = torch.nn.Parameter(torch.ones(net.value_dim, dtype=dtype))
        mark_sequence_parallel([self.out_norm], config)  # each rank norms its own heads
        common: dict[str, Any] = dict(config=config, bias=False, skip_bias_add=False, tp_group=self.tp_group)
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            net.key_heads * net.columns,
            init_method=config.init_method,
            gather_output=False,
            **common,
        )
        self.out_proj = RowParallelLinear(
            width, config.hidden_size, init_method=config.output_layer_init_method, input_is_parallel=True, **common
        )
        self.mixes_again = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules

    def forward(self, hidden: Tensor, attention_mask=None, *, packed_seq_params: AttentionInputs, **_):
        """Return the output and no bias, as Megatron's self-attention does."""
        columns = self.in_proj(hidden)[0].unflatten(-1, (self.heads, -1))  # [s, b, G, columns]
        gate_width = self.net.ratio * self.net.value_dim
        columns, gate = columns.split((self.net.columns - gate_width, gate_width), dim=-1)
        out = self.mix(columns, packed_seq_params)
        out = self.out_norm * F.rms_norm(out.float(), out.shape[-1:], None, self.config.layernorm_epsilon).to(
            gate.dtype
        )
        out = out * F.silu(gate.unflatten(-1, out.shape[-2:]).float())
        return self.out_proj(out.to(hidden.dtype).flatten(2))[0], None

    def mix(self, columns: Tensor, inputs: AttentionInputs) -> Tensor:
        """Convolve this rank's columns and carry states: ``[s, b, G, columns but the gate's] -> [s, b, G, R, dv]``.

        Raises:
            ValueError: the inputs have no plan of states, since no rule of their spec is one.
        """
        if (plan := inputs.delta) is None:
            raise ValueError(f"layer {self.layer_number}: the MaskSpec has no rule with state=True, which it computes")
        rows = gather_ranks(columns.flatten(2), self.cp_group).flatten(0, 2)  # [cp * s * b, G * columns]
        parameters = self.conv, self.a_log, self.dt_bias
        if self.mixes_again and self.training:
            out = checkpoint(partial(self._mix, plan), False, rows, *parameters)
        else:
            out = self._mix(plan, rows, *parameters)
        return out.unflatten(0, columns.shape[:2])

    def _mix(self, plan: DeltaPlan, rows: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
        """Mix the slots of all context-parallel ranks: ``[cp * s * b, G * columns] -> [s * b, G, R, dv]``, this
        rank's."""
        net = self.net
        chunks = plan.cut(rows).unflatten(-1, (self.heads, -1))  # [chunks, TAIL + C, G, columns]
        mixed = F.silu(convolve(chunks[..., : net.convolved], conv.view(self.heads, net.convolved, net.taps)))
        query, key, value = mixed.split((net.key_dim, net.key_dim, net.ratio * net.value_dim), dim=-1)
        a, b = chunks[:, -mixed.shape[1] :, :, net.convolved :].split(net.ratio, dim=-1)  # [chunks, C, G, R] each
        a_log, dt_bias = (x.view(self.heads, net.ratio).float() for x in (a_log, dt_bias))
        decay = -a_log.exp() * F.softplus(a.float() + dt_bias)
        out = plan.apply_rule(query, key, value.unflatten(-1, (net.ratio, -1)), decay, b.float().sigmoid())
        return plan.join(out).to(rows.dtype)

    def sharded_state_dict(self, prefix="", sharded_offsets: Any = (), metadata: Any = None):
        """Return the parameters as parts of a checkpoint that is read at any parallel size."""
        cut = {"conv": self.conv, "a_log": self.a_log, "dt_bias": self.dt_bias}
        state = make_sharded_tensors_for_checkpoint(
            cut | {"out_norm": self.out_norm},
            prefix,
            dict.fromkeys(cut, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name in ("in_proj", "out_proj"):
            state |= sharded_state_dict_default(getattr(self, name), f"{prefix}{name}.", sharded_offsets, metadata)
        return state


def _make_cut(values: Tensor) -> torch.nn.Parameter:
    """Make a parameter of which each tensor-parallel rank has its own rows."""
    parameter: Any = torch.nn.Parameter(values)
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
    return parameter
