"""The part of a layer that mixes tokens, alone: core attention or a state, on inputs that a probe draws."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from engines.megatron.engine import MegatronEngine
from engines.megatron.layout import Layout
from hardware.attention.inputs import AttentionInputs
from hardware.attention.rules import Rule
from hardware.megatron.states.mixer import DeltaNet

LOUD = 64.0
"""Size of the change to a token, so that one among thousands of tokens shows in bf16 too."""
_DECAY = 1e-3
"""About the decay of a state at a token, whatever the layer's weights: as little, so that no token is forgotten."""


def list_layers(engine: MegatronEngine, rule: Rule, every: bool) -> list:
    """List the layers of this rank's stage that compute rules of its form, by a state or by core attention.

    Args:
        every: whether to take each of them; else only the first and the last.

    Raises:
        ValueError: no layer of the model, on any stage, computes rules of this form.
        RuntimeError: a layer has core attention in the place of a state, or the other way round.
    """
    kinds, form = engine.model.kinds, "a state" if rule.state else "core attention"
    if all(kind.rule.state != rule.state for kind in kinds):
        raise ValueError(f"probe: no layer of {engine.model.folder!r} has {form}, which the rule {rule} is probed in")
    layers = [x for x in cast(Any, engine.decoder.decoder.layers) if kinds[x.layer_number - 1].rule.state == rule.state]
    for layer in layers:
        if hasattr(layer.self_attention, "core_attention") == rule.state:
            raise RuntimeError(
                f"probe: layer {layer.layer_number} has {type(layer.self_attention).__name__}, expected {form}, as its "
                f"kind in {engine.model.model_type} says"
            )
    return layers if every else list(dict.fromkeys(layers[:1] + layers[-1:]))


@dataclass(frozen=True)
class Mixing:
    """Mixes tokens by one rule.

    Attributes:
        engine: has the layers. layout: slots of the tokens. inputs: the rule, lowered. rule: the rule.
    """

    engine: MegatronEngine
    layout: Layout
    inputs: AttentionInputs
    rule: Rule

    def draw(self, changed: Iterable[int] = (), padding: float = 0.0) -> list[Tensor]:
        """Draw random inputs as this rank holds them: queries, keys and values of its heads, or columns of a state.

        Args:
            changed: numbers of tokens that get other inputs; the query of core attention, which moves nothing but its
                own row, stays, and so do gates of a state. padding: what a slot of padding has.
        """
        generator, tokens = torch.Generator().manual_seed(0), sum(self.inputs.spec.lengths)
        engine, places = self.engine, torch.as_tensor([*changed], dtype=torch.long)
        model, tp, drawn = engine.model, engine.config.tp, []
        if self.rule.state:
            net = next(mixer for mixer in model.mixers if isinstance(mixer, DeltaNet))
            flat = torch.randn(tokens, net.key_heads // tp, net.convolved + 2 * net.ratio, generator=generator)
            flat[places, :, : net.convolved] += LOUD
            drawn = [flat]
        else:
            for heads in (model.heads // tp, *[model.count_kv_heads(tp)] * 2):
                flat = torch.randn(tokens, heads, model.head_dim, generator=generator)
                if drawn:
                    flat[places] += LOUD
                drawn.append(flat)
        dtype = engine.transformer.params_dtype
        packed = [self.layout.pack(flat.to(engine.device, dtype), fill=padding) for flat in drawn]
        return [x.transpose(0, 1) if self.rule.state or self.inputs.qkv_format == "sbhd" else x[0] for x in packed]

    @torch.no_grad()
    def mix(self, layer, drawn: list[Tensor]) -> Tensor:
        """Put what was drawn through a layer: ``[N, ...]``."""
        if self.rule.state:
            mixer, (columns,) = layer.self_attention, drawn
            net, shift = mixer.net, columns.new_zeros(*columns.shape[-2:])  # [G, columns]
            lasting = math.log(_DECAY) - mixer.a_log - mixer.dt_bias  # decays are exp(a_log) * softplus(a + dt_bias)
            shift[:, net.convolved : net.convolved + net.ratio] = lasting.view(len(shift), -1)
            out = mixer.mix(columns + shift, self.inputs).transpose(0, 1)
        else:
            core = layer.self_attention.core_attention
            out = core(*drawn, self.inputs.attention_mask, attn_mask_type=None, packed_seq_params=self.inputs)
            out = out.transpose(0, 1) if self.inputs.qkv_format == "sbhd" else out[None]
        return self.layout.unpack(out, mpu.get_context_parallel_group())
