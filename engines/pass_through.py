"""Settings that are passed on to Megatron and to vLLM: their names are checked against the library's source."""

import ast
import difflib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from engines.validation import PassThrough, fits, spell


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VLLM_OWN = _names(
    "model dtype max_model_len max_num_seqs logprobs_mode worker_extension_cls disable_log_stats "
    "max_logprobs skip_tokenizer_init kv_cache_memory_bytes mm_processor_cache_gb limit_mm_per_prompt "
    "mm_device_do_normalize tensor_parallel_size distributed_executor_backend worker_cls "
    "enable_sleep_mode scheduling_policy config_format load_format mamba_ssm_cache_dtype weight_transfer_config"
)
"""Arguments of vLLM's LLM that the engine sets itself."""

VLLM_REASONS = {
    "it changes the distribution of tokens or their logprobs": _names(
        "generation_config override_generation_config logits_processors watermark_config diffusion_config "
        "speculative_config spec_method spec_model spec_tokens runner convert pooler_config"
    ),
    "it takes another model than the folder's, or other weights": _names(
        "hf_overrides hf_config_path model_class_overrides model_weights ignore_patterns "
        "quantization quantization_config enable_lora disable_sliding_window"
    ),
    "it makes other pixels than the trainer sees": _names("mm_processor_kwargs media_io_kwargs"),
    "prompts are split over --rollout.engines": _names("data_parallel_size"),
    "experts would move between devices, which no test of a weight sync here has tried": _names(
        "enable_eplb eplb_config"
    ),
    "it takes devices that were not set aside, or machines beside the engine's own": _names(
        "prefill_context_parallel_size nnodes node_rank"
    ),
}
VLLM_REFUSED = frozenset().union(*VLLM_REASONS.values())
"""Arguments of vLLM's LLM that would make it sample otherwise than by softmax(logits / temperature) of the trained
model, or report another logprob than its logarithm."""

MEGATRON_OWN = _names(
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization "
    "layernorm_epsilon activation_func gated_linear_unit add_bias_linear add_qkv_bias qk_layernorm "
    "attention_dropout hidden_dropout tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
    "sequence_parallel params_dtype pipeline_dtype bf16 init_method output_layer_init_method variable_seq_lengths "
    "moe_token_dispatcher_type batch_p2p_comm calculate_per_token_loss finalize_model_grads_func "
    "bias_activation_fusion bias_dropout_fusion masked_softmax_fusion gradient_accumulation_fusion apply_rope_fusion "
    "persist_layer_norm recompute_granularity recompute_modules recompute_method recompute_num_layers "
    "deterministic_mode hetereogenous_dist_checkpoint attention_output_gate"
)
"""Fields of Megatron's TransformerConfig that the engine sets itself."""

MEGATRON_REASONS = {
    "it makes another model than the folder's": _names(
        "num_moe_experts mtp_num_layers multi_latent_attention experimental_attention_variant linear_attention_freq "
        "window_size softmax_scale softmax_type qk_l2_norm qk_clip layernorm_zero_centered_gamma "
        "apply_residual_connection_post_layernorm apply_query_key_layer_scaling activation_func_clamp_value "
        "glu_linear_offset heterogeneous_block_specs is_hybrid_model fp16 fp8 fp4"
    ),
    "experts are those of config.json, and none drops a token": _names(
        "moe_shared_expert_intermediate_size moe_shared_expert_gate moe_shared_expert_overlap moe_layer_freq "
        "moe_ffn_hidden_size moe_router_load_balancing_type moe_router_topk moe_enable_routing_replay "
        "moe_router_topk_limited_devices moe_router_padding_for_quantization moe_router_padding_for_fp8 "
        "moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor "
        "moe_router_score_function moe_router_dtype moe_router_enable_expert_bias "
        "moe_router_bias_update_rate moe_router_force_load_balancing moe_grouped_gemm "
        "moe_use_legacy_grouped_gemm moe_input_jitter_eps "
        "moe_token_dropping moe_enable_deepep moe_flex_dispatcher_backend moe_per_layer_logging "
        "moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy "
        "moe_layer_recompute moe_permute_fusion moe_router_fusion moe_apply_probs_on_input moe_latent_size "
        "moe_deepep_num_sms moe_hybridep_num_sms expert_tensor_parallel_size moe_extended_tp"
    ),
    # the marks that initialising leaves
    "it puts layers where weights are not looked for, or leaves parameters without their marks": _names(
        "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
        "virtual_pipeline_model_parallel_size "
        "expert_model_parallel_size perform_initialization init_model_with_meta_device"
    ),
}
MEGATRON_REFUSED = frozenset().union(*MEGATRON_REASONS.values())
"""Fields of Megatron's TransformerConfig that would build another model, or one that the engine cannot load."""

MEGATRON_SOURCES = (
    ("core/transformer/transformer_config.py", "TransformerConfig"),
    ("core/model_parallel_config.py", "ModelParallelConfig"),
)
"""Files and classes of Megatron that define the fields of TransformerConfig."""


_LIBRARIES = {
    "megatron": ("actor: --actor.megatron", MEGATRON_OWN, MEGATRON_REASONS, MEGATRON_SOURCES),
    "vllm": ("rollout: --rollout.vllm", VLLM_OWN, VLLM_REASONS, (("engine/arg_utils.py", "EngineArgs"),)),
}
"""Library -> the setting that is passed on, arguments that the engine sets, those that it refuses by reason, and
sources of their types."""
_SAMPLING = ("sampling_params.py", "SamplingParams")


@cache
def read_installed_fields(package: str, *sources: tuple[str, str]) -> dict[str, Any] | None:
    """Read the fields of dataclasses from the source of an installed package, without importing it.

    Args:
        sources: file within the package, and name of the class in it.

    Returns:
        name -> type; None if the package or a class is not installed. Types other than int, float, bool, str, unions
            and literals become Any.
    """
    spec = find_spec(package)
    types: dict[str, Any] = {}
    for file, name in sources:
        paths = [Path(folder) / file for folder in (spec and spec.submodule_search_locations) or ()]
        texts = [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
        classes = [n for text in texts for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == name]
        if not classes:
            return None
        for line in classes[0].body:
            match line:
                case ast.AnnAssign(target=ast.Name(id=field), annotation=annotation) if not field.startswith("_"):
                    types[field] = _read_type(annotation)
    return types


def _read_type(annotation: ast.expr) -> Any:
    """Read the type that an annotation in a source names."""
    match annotation:
        case ast.Name(id=name):
            return {"int": int, "float": float, "bool": bool, "str": str}.get(name, Any)
        case ast.Constant(value=None):
            return NoneType
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _read_type(left) | _read_type(right)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return _read_type(inner) | None
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            return Literal[ast.literal_eval(inner)]
    return Any


def check_pass_through(library: Literal["megatron", "vllm"], given: PassThrough) -> None:
    """Raise ValueError if the engine cannot pass an argument on to the library, or its value has the wrong type."""
    where, own, reasons, sources = _LIBRARIES[library]
    known = read_installed_fields(library, *sources)
    if clashes := sorted(given.keys() & own):
        section = where.partition(":")[0]
        raise ValueError(
            f"{where} may not set {clashes}, which the engine sets itself; leave them out, or take the options that "
            f"--help {section} shows"
        )
    for reason, refused in reasons.items():
        if clashes := sorted(given.keys() & refused):
            raise ValueError(f"{where} may not set {clashes}: {reason}; leave them out")
    if known is None:
        return
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else "drop it"
            if library == "vllm" and name in (read_installed_fields(library, _SAMPLING) or {}):
                raise ValueError(
                    f"{where} has {name!r}, a sampling parameter that the trainer cannot follow; leave it out, and see "
                    "--help rollout for those that it follows"
                )
            raise ValueError(f"{where} has {name!r}, which the installed {library} does not take; {hint}")
        if not fits(known[name], given[name]):
            raise ValueError(f"{where} has {name} {given[name]!r}, expected {spell(known[name])}")
