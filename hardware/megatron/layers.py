"""Megatron modules that every platform shares: RMSNorm, rotation, the shell of core attention, the layer spec.

Imported by a platform's ``build_layer_spec`` alone, after the shims are in place.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from hardware.attention.inputs import AttentionInputs
from hardware.attention.rules import Rule
from hardware.collectives import gather_keys_values
from hardware.megatron.form import PLAIN, LayerOptions
from hardware.megatron.marks import mark_sequence_parallel

if TYPE_CHECKING:  # layers without experts load nothing of them
    from hardware.megatron.experts import GroupedExperts


class RMSNorm(torch.nn.Module):
    """Root mean square norm (arXiv:1910.07467). Megatron's own refuses sequence parallelism without fused kernels."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        mark_sequence_parallel([self.weight], config)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class NormFromOne(torch.nn.Module):
    """RMS norm that scales by 1 + weight, so that weight decay draws the scale to 1.

    It computes in fp32, as in transformers' Gemma 3.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        mark_sequence_parallel([self.weight], config)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (F.rms_norm(x.float(), (x.shape[-1],), None, self.eps) * (1 + self.weight.float())).to(x.dtype)


class NormedAdd(torch.nn.Module):
    """Adds ``residual + norm(output)``, instead of Megatron's bias, dropout and addition."""

    def __init__(self, config, norm: type[torch.nn.Module]):
        super().__init__()
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool):
        """Return the function that Megatron calls with ``(output, bias)``, the residual and a dropout rate."""
        return self._add

    def _add(self, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        return residual + self.norm(output_with_bias[0])


class _Rotate(torch.autograd.Function):
    """Rotates with one new tensor and halves of it, where autograd's own operators make five, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(gradients[0], cos, sin.roll(sin.shape[-1] // 2, -1), -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Compute ``[x1 cos1 - sign x2 sin1, x2 cos2 + sign x1 sin2]`` of the halves of ``[..., d]``.

    With ``sign`` -1 and the halves of ``sin`` exchanged it is the transposed product, which gradients take.
    """
    half, turned = x.shape[-1] // 2, x * cos
    turned[..., :half].add_(x[..., half:] * sin[..., :half], alpha=-sign)  # products are rounded, as transformers' are
    turned[..., half:].add_(x[..., :half] * sin[..., half:], alpha=sign)
    return turned


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embedding (arXiv:2104.09864) in HuggingFace's half-split form: ``x * cos + half(x) * sin``."""
    return cast(Tensor, _Rotate.apply(x, *rotary))


class CoreAttention(MegatronModule, ABC):
    """Scaled dot-product attention over sbhd ``[s, b, h, d]`` or thd ``[s, h, d]``, grouped-query and context-parallel.

    It rotates queries and keys of this rank's own slots, before keys are gathered over the context-parallel group, and
    takes the rule of its layer from ``AttentionInputs``. A platform implements ``attend`` with its kernels.
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type,
        attention_type: str,
        cp_comm_type=None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        options: LayerOptions = PLAIN,
    ):
        super().__init__(config=config)
        self.layer_number = layer_number  # counted from 1
        self.softmax_scale = options.attention_scale or softmax_scale or 1 / math.sqrt(config.kv_channels)
        self.rotary_kind, self.scales_rotary = options.rotary, options.scales_rotary
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask,
        *,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: AttentionInputs,
    ) -> Tensor:
        """Compute attention of a layer: ``[s, b, h * d]`` (sbhd) or ``[s, h * d]`` (thd).

        Raises:
            ValueError: a dense mask or a bias was passed, which this module would otherwise ignore.
        """
        if attention_mask is not None or attention_bias is not None:
            raise ValueError(
                f"core attention, layer {self.layer_number}: attention_mask and attention_bias must be None; "
                "state the rule in the MaskSpec"
            )
        inputs = packed_seq_params
        cos, sin = (x[self.rotary_kind] for x in inputs.rotary)
        query, key = (self._rotate_first(x, (cos, sin)) for x in (query, key))
        if self.cp_group.size() > 1:
            key, value = gather_keys_values(key, value, self.cp_group)
        return self.attend(query, key, value, inputs.plan, inputs.spec.get_rule(self.layer_number))

    def _rotate_first(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate as many of a head's first entries as there are cosines, and leave the rest."""
        turned = rotary[0].shape[-1]
        if turned == x.shape[-1]:
            return self.rotate(x, rotary)
        return torch.cat([self.rotate(x[..., :turned], rotary), x[..., turned:]], dim=-1)

    def rotate(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate queries or keys; a platform with a kernel for it overrides this."""
        return rotate(x, rotary)

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: Any, rule: Rule) -> Tensor:
        """Attend from rotated queries to the keys and values of all context-parallel ranks; shapes as in ``forward``.

        Args:
            plan: ``AttentionInputs.plan``. rule: the layer's rule.
        """


def build_layer_spec(
    config,
    options: Sequence[LayerOptions],
    core_attention: type[CoreAttention],
    plain_norm: type[torch.nn.Module] = RMSNorm,
    mlp: type[MLP] = MLP,
    grouped_experts: "type[GroupedExperts] | None" = None,
) -> TransformerBlockSubmodules:
    """Build Megatron's local layers with our norms, the model family's options and a platform's core attention.

    Args:
        options: of each layer of this pipeline stage.
        plain_norm, mlp, grouped_experts: the platform's modules, with torch's grouped product by default; a family with
            ``norms_from_one`` gets ``NormFromOne`` as norm.

    Raises:
        ValueError: the configuration has attention dropout, which the core attention does not support.
    """
    if config.attention_dropout:
        raise ValueError(f"core attention: attention_dropout must be 0, got {config.attention_dropout}")
    modules = core_attention, plain_norm, mlp, grouped_experts
    layers = {each: _build_layer(config, each, *modules) for each in set(options)}
    norm = cast(Any, layers[options[-1]].submodules).input_layernorm
    return TransformerBlockSubmodules(layer_specs=[layers[each] for each in options], layer_norm=norm)


def _build_layer(
    config,
    options: LayerOptions,
    core_attention: type[CoreAttention],
    plain_norm: type[torch.nn.Module],
    mlp: type[MLP],
    grouped_experts: "type[GroupedExperts] | None",
) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    parts = cast(Any, layer.submodules)  # an object, says Megatron's annotation
    norm = cast(Any, NormFromOne if options.norms_from_one else plain_norm)  # Megatron's annotation leaves out classes
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    parts.mlp.module = mlp
    if options.experts:
        from hardware.megatron.experts import ExpertLayer, GroupedExperts

        # No ModuleSpec: of one with a class that it does not know, Megatron warns in every layer.
        params = {"experts": options.experts, "mlp": parts.mlp, "grouped_experts": grouped_experts or GroupedExperts}
        parts.mlp = SimpleNamespace(module=ExpertLayer, params=params)
    if options.post_norms:
        parts.self_attn_bda = parts.mlp_bda = ModuleSpec(NormedAdd, {"config": config, "norm": norm})
    # The local spec renames norm weights in checkpoints to match fused layers; ours keep their own names.
    parts.sharded_state_dict_keys_map = {}
    if options.mixer.module:
        parts.self_attention = ModuleSpec(resolve_name(options.mixer.module), {"mixer": options.mixer})
        return layer
    attention = parts.self_attention.submodules
    attention.core_attention = ModuleSpec(core_attention, {"options": options})
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    return layer
