"""Gated delta nets in vLLM's CPU worker, in any dtype: vLLM's layer, with the trainer's arithmetic.

vLLM's own kernel (0.32) takes bfloat16 and key heads of 128 alone. A layer of ours takes the place of vLLM's by the
registry that vLLM has for it (``PluggableLayer``). Weights, metadata and the cache of states stay vLLM's.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from hardware.attention.delta_rule import TAIL, DeltaPlan, continue_delta_rule, convolve
from hardware.attention.mask_spec import MaskSpec
from hardware.vllm_versions import RETURNED_STATES

_PLANS = 64
"""Number of plans that are kept: a pass in which each request samples a token is planned like the one before."""


class Unpacked(UnquantizedLinearMethod):
    """Leaves a weight as it was loaded: in bfloat16 vLLM packs that of a convolution for its own kernel."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Do nothing."""


class StateRuleLayer(QwenGatedDeltaNetAttention):
    """vLLM's layer, which mixes the tokens of a pass as ``hardware.megatron.states.delta_net.GatedDeltaNet`` does."""

    conv1d: Any

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.conv1d.quant_method = Unpacked()

    def forward_cpu(self, hidden_states: Tensor, output: Tensor | None = None) -> Tensor | None:
        """Mix the tokens of a pass ``[slots, H]``, into ``output`` in versions before ``RETURNED_STATES``."""
        joined, _ = self.in_proj_qkvz(hidden_states)
        gates, _ = self.in_proj_ba(hidden_states)
        if self.gqa_interleaved_layout:  # as Qwen3-Next's folder has them, by key heads
            *parts, z, b, a = self.fix_query_key_value_ordering(joined, gates)
            mixed, gates = torch.cat([part.flatten(1) for part in parts], dim=-1), torch.cat([b, a], dim=-1)
        else:
            mixed, z = joined.split((self.conv1d.weight.shape[0], self.value_dim // self.tp_size), dim=-1)
            z = z.unflatten(-1, (-1, self.head_v_dim))
        out = torch.zeros_like(z)
        metadata: Any = get_forward_context().attn_metadata
        if metadata is not None:  # a pass that measures memory has none
            self._mix(torch.cat([mixed, gates], dim=-1), out, metadata[self.prefix])
        if RETURNED_STATES.is_there:
            return self._output_projection(out, z)
        project: Any = self._output_projection
        project(out, z, output, len(hidden_states))
        return None

    def _mix(self, columns: Tensor, out: Tensor, metadata: GDNAttentionMetadata) -> None:
        """Mix the tokens ``[slots, D]`` of a pass into ``out`` ``[slots, H, dv]``, and keep each request's state and
        its last inputs of the convolution."""
        lengths, slots, fresh = _read_requests(metadata)
        plan, order, ends = _plan_pack(lengths)
        slots, fresh = slots[order], fresh[order]
        kept, states = self.kv_cache
        kept = kept.mT if is_conv_state_dim_first() else kept  # [blocks, taps - 1, D]
        width, taps = self.conv1d.weight.shape[0], self.conv1d.weight.shape[-1]

        chunks = plan.cut(columns[: sum(lengths)])  # [chunks, TAIL + C, D and gates]
        first = chunks[: len(slots), TAIL - taps + 1 : TAIL, :width]
        first.copy_(kept[slots].masked_fill(fresh[:, None, None], 0))
        kept[slots] = chunks[..., :width].flatten(0, 1)[ends[:, TAIL - taps + 1 :]].to(kept.dtype)

        convolved = F.silu(convolve(chunks[..., :width], self.conv1d.weight.view(width, taps)))
        groups, keys = self.num_k_heads // self.tp_size, self.key_dim // self.tp_size
        query, key, value = (
            x.unflatten(-1, (groups, -1)) for x in convolved.split((keys, keys, width - 2 * keys), dim=-1)
        )
        beta, decay = chunks[:, TAIL:, width:].float().unflatten(-1, (2, groups, -1)).unbind(2)
        a_log, dt_bias = (x.view(groups, -1).float() for x in (self.A_log, self.dt_bias))
        before = states[slots].masked_fill(fresh[:, None, None, None], 0).float().mT.unflatten(1, (groups, -1))
        mixed, after = continue_delta_rule(
            query,
            key,
            value.unflatten(-1, (-1, self.head_v_dim)),
            -a_log.exp() * F.softplus(decay + dt_bias),
            beta.sigmoid(),
            plan,
            before,
        )
        states[slots] = after.flatten(1, 2).mT.to(states.dtype)  # vLLM's are [blocks, H, dv, dk]
        out[: sum(lengths)] = plan.join(mixed).flatten(1, 2)


def _read_requests(metadata: GDNAttentionMetadata) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """Read of each request with tokens their number, the block of its state, and whether it begins with this pass."""
    count = metadata.num_decodes + metadata.num_prefills
    starts, blocks = metadata.non_spec_query_start_loc, metadata.non_spec_state_indices_tensor
    assert starts is not None and blocks is not None, "vLLM leaves them out where all tokens are drafted"
    lengths, fresh = starts[: count + 1].diff(), torch.zeros(count, dtype=torch.bool)
    if metadata.has_initial_state is not None:  # else each request samples its next token
        fresh = ~metadata.has_initial_state[:count].bool()
    has_tokens = lengths > 0
    return tuple(lengths[has_tokens].tolist()), blocks[:count][has_tokens].long(), fresh[has_tokens]


@lru_cache(_PLANS)
def _plan_pack(lengths: tuple[int, ...]) -> tuple[DeltaPlan, Tensor, Tensor]:
    """Plan a pass.

    Returns:
        the plan; the number of the request of each chunk of the first level; in their order, the places ``[requests,
        TAIL]`` of each request's last tokens among the flattened chunks, those before it included.
    """
    plan = DeltaPlan.build(MaskSpec("thd", lengths, lengths))
    counts = torch.tensor(plan.counts)
    row = torch.arange(plan.counts[0])
    level = (counts > row[:, None]).sum(-1) - 1  # of a request's last chunk, which has its row within the level
    last = (counts.cumsum(0) - counts)[level] + row
    ends = last * plan.slots.shape[1] + plan.filled[last].sum(-1)
    return plan, plan.slots[row, TAIL].argsort().argsort(), ends[:, None] + torch.arange(TAIL)


def install() -> None:
    """Make vLLM models that this process builds from now on compute states by ``StateRuleLayer``."""
    op_registry_oot[QwenGatedDeltaNetAttention.__name__] = StateRuleLayer
