"""A Megatron GPT of the shape a HuggingFace folder describes."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch.nn.modules.module import register_module_parameter_registration_hook

from engines.config import MegatronConfig
from engines.megatron.weights import load_weights, name_parameters
from engines.models.spec import ModelSpec
from engines.models.weight import is_adapter
from hardware.megatron.marks import mark_sequence_parallel
from hardware.platform import Platform

_RECOMPUTE = {
    "none": {},
    "core": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


_ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}
"""HuggingFace's name of an activation -> the function."""


def _leave_as_is(weight: torch.Tensor) -> torch.Tensor:
    return weight


def build_transformer_config(model: ModelSpec, config: MegatronConfig) -> TransformerConfig:
    """Build Megatron's configuration of the model, with the user's pass-through beside it."""
    dtype = getattr(torch, config.dtype)
    settings = dict(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        activation_func=_ACTIVATIONS[model.activation],
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm,
        attention_output_gate=model.gates_output,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        context_parallel_size=config.cp,
        sequence_parallel=config.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=config.dtype == "bfloat16",
        # Weights are read from a folder. Megatron marks how a parameter is cut while it initialises it, so it must run.
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        # Micro-batches differ in length, so stages tell each other the shape first. Megatron allows that with this
        # dispatcher only, in models without experts too.
        variable_seq_lengths=config.pp > 1,
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=False,
        # The loss closure returns a sum and its token count; finalize_model_grads divides once by the step's tokens.
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        deterministic_mode=config.deterministic,
        # Layers of one kind lie in a checkpoint as one tensor of each parameter, layers of several do not.
        hetereogenous_dist_checkpoint=len({(kind.mixer, kind.mlp) for kind in model.kinds}) > 1,
    )
    settings |= _RECOMPUTE[config.recompute]
    return TransformerConfig(**settings | config.megatron)


class Decoder(GPTModel):
    """A GPT whose last stage returns hidden states ``[s / tp, b, h]``; the engine makes logprobs or values of them."""

    output_layer: Any
    """Megatron's over the vocabulary, or a ``ValueHead``."""

    def _preprocess(self, *args, padding_mask=None, **kwargs):
        # Megatron would take it for a mask of the first stage's ids, and cut it there. Ours is of any stage, and cut.
        found = super()._preprocess(*args, **kwargs)
        return (*found[:5], padding_mask, *found[6:])

    def _postprocess(self, hidden_states, *args, **kwargs):
        return hidden_states

    @property
    def output_weight(self) -> torch.Tensor:
        """Weight ``[v / tp, h]`` of the output layer, on the last stage."""
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight


class ValueHead(torch.nn.Module):
    """A linear layer from hidden states to one value each. Every tensor-parallel rank has all of it and sees its own
    tokens."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        mark_sequence_parallel(self.parameters(), config)
        self.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute values of hidden states: ``[s / tp, b, h] -> [s, b]`` float32."""
        values = (hidden.float() @ self.weight.float().T + self.bias.float())[..., 0]
        # Every rank computes the same loss from all the values, so each takes its own tokens' part of the gradient.
        return gather_from_sequence_parallel_region(values, False) if self.sequence_parallel else values


def _scale_embedding(embedding: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
    """Scale token embeddings ``[s / tp, b, h]`` by sqrt(h), rounded to their own type as transformers rounds it."""
    return output * torch.tensor(output.shape[-1] ** 0.5, dtype=output.dtype)


def build_model(
    model: ModelSpec,
    config: TransformerConfig,
    platform: Platform,
    device: torch.device,
    base: Decoder | None = None,
) -> Decoder:
    """Build this rank's part of the model, with the weights of its folder.

    Args:
        base: the same rank's part of the same folder, built before and frozen but for its adapters. Its parameters are
            this module's too, but for a critic's head, and are read no second time.
    """
    tp, first = config.tensor_model_parallel_size, get_transformer_layer_offset(config)
    with _building_without_memory() if base else nullcontext():
        module = Decoder(
            config,
            platform.build_layer_spec(config, model.options[first : first + get_num_layers_to_build(config)]),
            vocab_size=-(-model.vocab // tp) * tp,
            max_sequence_length=model.max_positions,
            pre_process=mpu.is_pipeline_first_stage(),
            post_process=mpu.is_pipeline_last_stage(),
            position_embedding_type="none",
            share_embeddings_and_output_weights=model.tied,
        )
        if model.vision and module.pre_process:
            from engines.megatron.vision.embedding import add_tower

            add_tower(module, model.vision)
    if model.family.scales_embedding and module.pre_process:
        module.embedding.register_forward_hook(_scale_embedding)
    if model.head == "value" and module.post_process:
        module.output_layer = ValueHead(config)
    shared = dict(base.named_parameters()) if base else {}
    for name in [name for name, parameter in module.named_parameters() if parameter.is_meta]:
        place, _, last = name.rpartition(".")
        setattr(module.get_submodule(place), last, shared[name])
    for parameter in module.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    module.to(device)  # where Megatron's own layers are already
    load_weights(module, model, {*shared.values()})
    return module


@contextmanager
def _building_without_memory() -> Iterator[None]:
    """Leave parameters that modules register in this context without memory, as soon as each is registered."""
    leave: Any = lambda _, __, parameter: torch.nn.Parameter(parameter.detach().to("meta"))  # noqa: E731
    handle = register_module_parameter_registration_hook(leave)
    try:
        yield
    finally:
        handle.remove()


def choose_learning(module: Decoder, model: ModelSpec, config: MegatronConfig, trainable: bool) -> None:
    """Choose the parameters that get gradients: those that the settings do not freeze, or adapters in their place."""
    for name, parameter in name_parameters(module).items():
        weight = model.weights.get(name)  # none of a tied output layer's own, nor of an adapter
        frozen = config.freezes(weight.part, weight.is_head) if weight else config.freezes("language")
        parameter.requires_grad_(trainable and (is_adapter(name) or not frozen))


class FrozenModel(torch.nn.Module):
    """A model without gradients, wrapped like a trained one so that ``.module`` means the same."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module
        self.config = module.config

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)
