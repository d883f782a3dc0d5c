"""What the project uses of vLLM: read from the project's own source, and, where types do not tell, from a table.

``USES`` says which class has an attribute. A name that the project reads in a file that imports vLLM, and that is
neither the project's own nor of another library, must be in it.
"""

import ast
import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import difflib
import importlib
import itertools
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import torch
from support.suite.imports import ROOT, parse
from support.suite.vllm_sources import Sources

from hardware.vllm_versions import CACHE_MANAGER, CAUSAL_FLAGS, CPU_EXPERTS, SENDERS, Feature

PACKAGES = ("hardware", "engines", "rlworker")
FILES = [
    path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if re.search(r"^\s*(from|import) vllm\b", path.read_text(), re.MULTILINE)
]
"""Files that import vLLM."""
GUARDED = {
    "hardware/cpu/weight_transfer.py": SENDERS,
    "hardware/cuda/weight_transfer.py": SENDERS,
    "engines/vllm/transfer.py": SENDERS,
    "rlworker/cluster/weights/transfer.py": SENDERS,
    "hardware/cpu/rollout_experts.py": CPU_EXPERTS,
}
"""Files that are imported only if vLLM has a feature."""

_ENGINE = "vllm.v1.engine"
_WORKER = "vllm.v1.worker"
_RELOAD = "vllm.model_executor.model_loader.reload"
_MOE = "vllm.model_executor.layers.fused_moe"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
USES: dict[str, str] = {
    # The engine's process.
    "vllm.entrypoints.llm:LLM": "llm_engine collective_rpc generate encode sleep wake_up",
    f"{_ENGINE}.llm_engine:LLMEngine": "engine_core output_processor add_request abort_request step sleep wake_up "
    "has_unfinished_requests get_num_unfinished_requests reset_prefix_cache reset_encoder_cache",
    f"{_ENGINE}.core_client:InprocClient": "engine_core shutdown",
    f"{_ENGINE}.core:EngineCore": "batch_queue scheduler model_executor",
    f"{_ENGINE}.output_processor:OutputProcessor": "request_states",
    f"{_ENGINE}.output_processor:RequestState": "parent_req external_req_id request_index detokenizer",
    f"{_ENGINE}.parallel_sampling:ParentRequest": "external_req_id",
    f"{_ENGINE}.detokenizer:IncrementalDetokenizer": "num_output_tokens",
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor": "register_failure_callback",
    "vllm.sampling_params:RequestOutputKind": "FINAL_ONLY",
    "vllm.sampling_params:SamplingParams": "output_kind",
    "vllm.outputs:RequestOutput": "request_id prompt_token_ids prompt_logprobs outputs",
    "vllm.outputs:CompletionOutput": "token_ids logprobs finish_reason index routed_experts",
    "vllm.logprobs:FlatLogprobs": "token_ids logprobs",
    # The scheduler, which has the connector of shared prompts.
    "vllm.v1.core.sched.scheduler:Scheduler": "connector kv_cache_manager",
    "vllm.v1.core.kv_cache_manager:KVCacheManager": "get_block_ids",
    "vllm.v1.core.sched.output:SchedulerOutput": "num_scheduled_tokens kv_connector_metadata",
    "vllm.v1.request:Request": "request_id num_prompt_tokens num_computed_tokens num_output_tokens prompt_token_ids "
    "mm_features skip_reading_prefix_cache",
    "vllm.v1.kv_cache_interface:KVCacheConfig": "kv_cache_groups num_blocks",
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": "kv_cache_spec layer_names",
    "vllm.v1.kv_cache_interface:KVCacheSpec": "block_size",
    "vllm.config:VllmConfig": "cache_config scheduler_config parallel_config model_config",
    "vllm.config:CacheConfig": "enable_prefix_caching",
    "vllm.config:SchedulerConfig": "long_prefill_token_threshold",
    "vllm.config:ParallelConfig": "enable_expert_parallel rank",
    # A worker, its model and its sampler.
    f"{_WORKER}.gpu_worker:Worker": "vllm_config model_config parallel_config device model_runner init_device "
    "_weight_update_active start_weight_update finish_weight_update init_weight_transfer_engine update_weights",
    f"{_WORKER}.gpu_model_runner:GPUModelRunner": "get_model attn_groups sampler input_batch kv_cache_config "
    "execute_model",
    f"{_WORKER}.utils:AttentionGroup": "get_metadata_builder",
    f"{_WORKER}.gpu_input_batch:InputBatch": "req_ids num_computed_tokens_cpu block_table",
    f"{_WORKER}.block_table:BlockTable": "block_size get_numpy_array",
    "vllm.v1.sample.sampler:Sampler": "logprobs_mode topk_topp_sampler use_fp64_gumbel compute_logprobs",
    "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler": "forward_cpu",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum": "CPU_ATTN clear_override",
    f"{_RELOAD}.types:LayerReloadingInfo": "kernel_tensors load_numel loaded_weights can_load reset",
    "vllm.model_executor.layers.linear:LinearBase": "quant_method tp_size",
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod": "apply process_weights_after_loading",
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding": "quant_method weight_loader",
    "vllm.platforms.interface:Platform": "is_cpu",
    # Attention, states and experts on a CPU.
    "vllm.v1.attention.backend:CommonAttentionMetadata": "query_start_loc query_start_loc_cpu seq_lens num_reqs causal "
    "block_table_tensor max_query_len",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend": "supports_mm_prefix get_builder_cls",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder": "build",
    "vllm.forward_context:ForwardContext": "attn_metadata",
    "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadata": "num_decodes num_prefills has_initial_state "
    "non_spec_query_start_loc non_spec_state_indices_tensor",
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention": "in_proj_qkvz in_proj_ba "
    "gqa_interleaved_layout fix_query_key_value_ordering conv1d value_dim key_dim tp_size head_v_dim num_k_heads "
    "prefix kv_cache A_log dt_bias forward_cpu _output_projection",
    # Tools.
    "vllm.tool_parsers:ToolParserManager": "get_tool_parser",
    "vllm.tool_parsers.abstract_tool_parser:ToolParser": "extract_tool_calls",
    "vllm.tool_parsers.abstract_tool_parser:ExtractedToolCallInformation": "tool_calls content",
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory": "register_engine",
}
"""Module and class -> attributes and methods of its instances that the project uses in every version."""
FEATURE_USES: dict[Feature, dict[str, str]] = {
    CACHE_MANAGER: {_CONNECTOR: "bind_kv_cache_manager"},
    CAUSAL_FLAGS: {
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadata": "dynamic_causal",
        "vllm.v1.attention.backend:CommonAttentionMetadata": "mm_req_doc_ranges",
    },
    SENDERS: {
        "vllm.distributed.weight_transfer.nccl_engine:NCCLTrainerWeightTransferEngine": "model_update_group _broadcast "
        "_checked_iter init_info_cls is_sender packed_buffer_size_bytes send_weights shutdown source trainer_init",
        "vllm.distributed.weight_transfer.nccl_engine:NCCLWeightTransferEngine": "model model_update_group "
        "parallel_config packed_buffer_size_bytes init_transfer_engine receive_weights shutdown parse_update_info "
        "update_weights",
        "vllm.distributed.weight_transfer.nccl_common:NCCLWeightTransferInitInfo": "master_address master_port "
        "rank_offset world_size packed_buffer_size_bytes",
        "vllm.distributed.weight_transfer.nccl_engine:NCCLWeightTransferUpdateInfo": "dtype_names names shapes",
        "vllm.distributed.weight_transfer.packed_tensor:PackedChunk": "packed_tensor",
        "vllm.distributed.weight_transfer.factory:WeightTransferTrainerFactory": "register_engine trainer_init",
        "vllm.distributed.weight_transfer:WeightSource": "metadata",
    },
    CPU_EXPERTS: {
        f"{_MOE}.experts.cpu_moe:CPUUnquantizedExperts": "apply isa _use_zentorch",
        f"{_MOE}.fused_moe_method_base:FusedMoEMethodBase": "moe_kernel",
        f"{_MOE}.modular_kernel:FusedMoEKernel": "fused_experts",
        f"{_MOE}.router.base_router:BaseRouter": "set_capture_fn",
        f"{_MOE}.runner.moe_runner:MoERunner": "router layer_id",
    },
}
"""Feature -> uses as in ``USES`` of versions that have it."""
OLDER_USES: dict[Feature, dict[str, str]] = {
    CPU_EXPERTS: {
        f"{_MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod": "cpu_fused_moe",
        f"{_MOE}.cpu_fused_moe:CPUFusedMOE": "isa",
    }
}
"""Feature -> uses as in ``USES`` of versions that do not have it yet."""
OTHERS = {
    *("set", "aten"),  # of torch's stores and operators
    *("cpu_linear", "kernel_non_persistent_buffers"),  # set on a layer if there is one
    *("tie_word_embeddings", "get_text_config", "from_pretrained", "kv_channels", "rotary_kind"),  # Megatron's and HF's
    *("model_validate", "__dataclass_fields__", "__subclasses__", "cache_clear", "daemon", "propagate", "exc_info"),
    *("get_node_ip_address", "kill", "util", "remote", "submodule_search_locations", "from_iterable", "prctl"),
    *("_non_persistent_buffers_set", "_set_allocator_settings", "rootRank", "_cached_get_attn_backend"),
}
"""Names of other libraries, and of functions, which the imports show."""
_LIBRARIES = (
    *(str, dict, list, set, tuple, int, bytes, torch, torch.Tensor, torch.nn.Module, torch.nn.functional),
    *(torch.distributed, np, np.ndarray, ast, re, Path, os, sys, time, json, signal, socket, socket.socket, logging),
    *(logging.Logger, importlib, threading, threading.Condition, threading.Timer, collections, collections.deque),
    *(concurrent.futures.Future, contextlib, ctypes, dataclasses, difflib, itertools, resource_tracker, Exception),
    *(json.JSONDecoder, os.path),
)
_OWN = re.compile(r"def (\w+)|self\.(\w+)\s*[:=]|^\s+(\w+)\s*:\s|^\s+(\w+) = |self\.(_\w+)", re.MULTILINE)
"""Names that the project defines, and private ones of its own objects."""


def list_known_names() -> set[str]:
    """List the names of attributes that need no entry: the project's own, and those of other libraries."""
    texts = (path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    own = {name for text in texts for names in _OWN.findall(text) for name in names if name}
    return own | OTHERS | {name for each in _LIBRARIES for name in dir(each)}


def list_read_names() -> dict[str, Path]:
    """List the attributes that the files with vLLM read, also by ``getattr`` and ``hasattr``, each with a file."""
    found: dict[str, Path] = {}
    for path in FILES:
        for node in ast.walk(parse(path)):
            match node:
                case ast.Attribute(attr=name):
                    found.setdefault(name, path)
                case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                    found.setdefault(name, path)
    return found


@dataclass(frozen=True)
class Imported:
    """A name that a file imports from vLLM, and the keywords with which the file calls it."""

    path: str
    module: str
    name: str
    keywords: frozenset[str]


def list_imports() -> Iterator[Imported]:
    """List what files import from vLLM."""
    for path in FILES:
        tree = parse(path)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        named = [call for call in calls if isinstance(call.func, ast.Name)]
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("vllm"):
                continue
            for alias in node.names:
                own = [call for call in named if call.func.id == (alias.asname or alias.name)]
                keywords = {keyword.arg for call in own for keyword in call.keywords if keyword.arg}
                yield Imported(str(path.relative_to(ROOT)), node.module, alias.name, frozenset(keywords))


def list_method_calls() -> Iterator[tuple[str, str, frozenset[str]]]:
    """List the calls of methods with keywords: file, name and keywords."""
    for path in FILES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.keywords:
                keywords = frozenset(keyword.arg for keyword in node.keywords if keyword.arg)
                yield str(path.relative_to(ROOT)), node.func.attr, keywords


@dataclass(frozen=True)
class Override:
    """A method of a class of the project that inherits from vLLM's.

    Attributes:
        bases: module and name of each class of vLLM's. arguments: names behind the first.
    """

    path: str
    bases: tuple[tuple[str, str], ...]
    name: str
    arguments: tuple[str, ...]


def list_overrides() -> Iterator[Override]:
    """List the methods of the project's classes that inherit from vLLM's."""
    imports = list(list_imports())
    for path in FILES:
        file = str(path.relative_to(ROOT))
        places = {each.name: each.module for each in imports if each.path == file}
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            names = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in places]
            bases = tuple((places[name], name) for name in names)
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)] if bases else []
            for method in methods:
                is_static = any(getattr(each, "id", "") == "staticmethod" for each in method.decorator_list)
                arguments = tuple(each.arg for each in method.args.args[0 if is_static else 1 :])
                if not method.name.startswith("__"):
                    yield Override(file, bases, method.name, arguments)


def collect_settings() -> set[str]:
    """Collect the arguments of vLLM's LLM that the project sets."""
    from hardware.platforms import PLATFORMS, get_platform

    names = {name for platform in PLATFORMS for name in get_platform(platform).rollout_settings}
    for path in (ROOT / "engines/vllm/engine.py", ROOT / "engines/vllm/classifier.py"):
        for node in ast.walk(parse(path)):
            match node:
                case ast.Call(func=ast.Name(id="dict"), keywords=keywords):
                    names |= {keyword.arg for keyword in keywords if keyword.arg}
                case ast.Assign(targets=[ast.Subscript(value=ast.Name(id="settings" | "arguments"), slice=key)]):
                    names.add(key.value)
                case ast.AugAssign(target=ast.Name(id="settings"), value=ast.Dict(keys=keys)):
                    names |= {key.value for key in keys if isinstance(key, ast.Constant)}
    return names


def list_missing(sources: Sources, version: str) -> list[str]:
    """List the uses that a version does not have."""
    missing = []
    uses = [USES, *(table for feature, table in FEATURE_USES.items() if feature.was_in(version))]
    uses += [table for feature, table in OLDER_USES.items() if not feature.was_in(version)]
    for table in uses:
        for owner, names in table.items():
            attributes = sources.list_attributes(*owner.split(":"))
            missing += [f"{owner} has no {name}" for name in names.split() if name not in attributes]
    for used in list_imports():
        if (feature := GUARDED.get(used.path)) and not feature.was_in(version):
            continue
        if not sources.has_name(used.module, used.name):
            missing.append(f"{used.path} imports {used.name} of {used.module}")
        else:
            taken = sources.list_call_arguments(used.module, used.name)
            unknown = used.keywords - taken if taken and "**" not in taken else ()
            missing += [f"{used.path} calls {used.name} with {keyword}" for keyword in sorted(unknown)]
    return missing + _list_wrong_calls(sources, version) + _list_wrong_overrides(sources, version)


def _list_wrong_calls(sources: Sources, version: str) -> list[str]:
    """List the calls of vLLM's methods with keywords that none of their classes takes, and unknown settings."""
    owners: dict[str, list[str]] = {}
    for owner, names in USES.items():
        for name in names.split():
            owners.setdefault(name, []).append(owner)
    wrong = []
    for path, name, keywords in list_method_calls():
        lineages = [sources.list_lineage(*owner.split(":")) for owner in owners.get(name, ())]
        methods = [next((c.methods[name] for c in lineage if name in c.methods), None) for lineage in lineages]
        methods = [arguments for arguments in methods if arguments is not None]
        feature = GUARDED.get(path)
        if not methods or (feature and not feature.was_in(version)):
            continue
        if not any("**" in arguments or keywords <= set(arguments) for arguments in methods):
            wrong.append(f"{path} calls {name} with {sorted(keywords)}")
    arguments = sources.list_call_arguments("vllm.engine.arg_utils", "EngineArgs")
    arguments |= sources.list_call_arguments("vllm.entrypoints.llm", "LLM")
    return wrong + [f"LLM takes no {name}" for name in sorted(collect_settings() - arguments)]


ADDED = {
    *("record_routes", "take_routes"),  # called by collective_rpc
    "_mix",
    "_do_nothing",
    "_can_share",
    "_find_source",
    "_list_blocks",
    "drain",
    "apply_own",
}
"""Methods that the project adds to classes of vLLM's."""


def _list_wrong_overrides(sources: Sources, version: str) -> list[str]:
    """List the methods that vLLM would not call, or would call with other arguments."""
    wrong = []
    for override in list_overrides():
        feature = GUARDED.get(override.path)
        is_older = override.name == "bind_kv_cache_manager" and not CACHE_MANAGER.was_in(version)
        if override.name in ADDED or is_older or (feature and not feature.was_in(version)):
            continue
        lineage = [source for base in override.bases for source in sources.list_lineage(*base)]
        theirs = next((source.methods[override.name] for source in lineage if override.name in source.methods), None)
        own = list(override.arguments)
        if theirs is None:
            wrong.append(f"{override.path}: {override.bases} have no method {override.name}")
        elif "*" not in theirs and own[: len(theirs)] != theirs[: len(own)]:
            wrong.append(f"{override.path}: {override.name} takes {own}, and vLLM's {theirs}")
    return wrong
