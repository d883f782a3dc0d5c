"""Samples of a prompt share the prompt's whole KV cache in vLLM, so that a prompt is computed once.

vLLM's prefix cache shares whole blocks, and every sample computes the rest of its prompt by itself: for 50 tokens and
blocks of 32 that is a third, once for each sample. Here a connector reports this rest, except for its last token, as
cached. It copies the blocks from a request that computes them, in the same forward pass or an earlier one. vLLM writes
a layer's keys and values of all requests before it calls a connector, and reads them after it. Versions before
``KEYS_FIRST`` write them later, so that the pass must be an earlier one.

Blocks are copied whole, since the layout of keys within a block belongs to the kernel. Entries of a copy beyond the
prompt belong to the other request's sample, and are overwritten before they are read.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request

from hardware.vllm_versions import KEYS_FIRST


@dataclass
class Copies(KVConnectorMetadata):
    """Blocks to copy in a forward pass: for each group of layers, pairs ``(from, to)``."""

    groups: list[list[tuple[int, int]]]


class SharedPrompts(KVConnectorBase_V1, SupportsHMA):
    """A connector that copies the rest of a prompt's KV cache beyond the blocks that vLLM shares.

    The instance in the scheduler decides, and the instance in each worker copies. Prompts with images are left out: the
    part of a prompt that a forward pass takes is not known before it is scheduled.
    """

    requires_kv_delivery = False  # pyright: ignore[reportAssignmentType]  no other engine waits for this cache

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self._groups = kv_cache_config.kv_cache_groups
        self._blocks = kv_cache_config.num_blocks
        # A state is of all tokens before it: no part of a prompt has blocks of it that could be copied.
        has_states = any(isinstance(group.kv_cache_spec, MambaSpec) for group in self._groups)
        self._shares = vllm_config.cache_config.enable_prefix_caching and not has_states
        self._cuts_prompts = vllm_config.scheduler_config.long_prefill_token_threshold > 0
        self._holders: dict[tuple[int, ...], dict[str, Request]] = {}  # requests that have blocks, by their prompt
        self._begun: set[str] = set()  # those that begin to compute their prompt in the step that is being scheduled
        self._copied: list[tuple[Request, Request, int]] = []  # in this step: from, to, and the position it begins at
        self._caches: dict[str, Tensor] = {}
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}  # blocks from and to, by layer
        self._manager: KVCacheManager | None = None

    # -- in the scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        self._manager = kv_cache_manager

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        if request.skip_reading_prefix_cache:  # a prompt whose logprobs are asked for is computed whole
            return 0, False
        left = request.num_prompt_tokens - 1 - num_computed_tokens  # the last token is computed, to sample from it
        return (left if left > 0 and self._find_source(request, num_computed_tokens) else 0), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if not self._can_share(request):
            return
        if num_external_tokens:
            start = request.num_prompt_tokens - 1 - num_external_tokens
            source = self._find_source(request, start)
            assert source, "asked a moment ago"
            self._copied.append((source, request, start))
        else:
            self._begun.add(request.request_id)
        self._holders.setdefault(_get_prompt(request), {})[request.request_id] = request

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Copies:
        groups: list[list[tuple[int, int]]] = [[] for _ in self._groups]
        for source, request, start in self._copied:
            computed = source.num_computed_tokens + scheduler_output.num_scheduled_tokens.get(source.request_id, 0)
            if computed < (length := source.num_prompt_tokens):
                raise RuntimeError(
                    f"rollout: a forward pass ends after {computed} of a prompt's {length} tokens, and other requests "
                    "copy all of them; set --rollout.vllm enable_prefix_caching False"
                )
            blocks = zip(self._list_blocks(source, start), self._list_blocks(request, start), strict=True)
            for pairs, (sources, targets) in zip(groups, blocks, strict=True):
                pairs += [pair for pair in zip(sources, targets, strict=True) if pair[1]]
        self._begun, self._copied = set(), []
        return Copies(groups)

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        if self._can_share(request):
            holders = self._holders.get(prompt := _get_prompt(request), {})
            holders.pop(request.request_id, None)
            if not holders:
                self._holders.pop(prompt, None)
        return False, None

    def _can_share(self, request: Request) -> bool:
        return self._shares and not request.mm_features and request.prompt_token_ids is not None

    def _find_source(self, request: Request, start: int) -> Request | None:
        """Find a request that has all of the prompt from ``start`` on once this step is computed."""
        if not self._can_share(request) or request.num_output_tokens:  # a copy would overwrite those in its last block
            return None
        for source in self._holders.get(_get_prompt(request), {}).values():
            # A pass that takes a part of a prompt has no room for another request, unless prompts are cut on purpose.
            will_be = source.request_id in self._begun and not self._cuts_prompts and KEYS_FIRST.is_there
            is_whole = will_be or source.num_computed_tokens >= source.num_prompt_tokens
            if is_whole and all(0 not in blocks for blocks in self._list_blocks(source, start)):
                return source
        return None

    def _list_blocks(self, request: Request, start: int) -> Iterator[list[int]]:
        """List the blocks that hold the prompt from ``start`` on, of each group; 0 has left a window."""
        assert self._manager
        for group, blocks in zip(self._groups, self._manager.get_block_ids(request.request_id), strict=True):
            size = group.kv_cache_spec.block_size
            yield blocks[start // size : (request.num_prompt_tokens - 1) // size + 1]

    # -- in a worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        for name, cache in kv_caches.items() if self._shares else ():
            if len(cache) != self._blocks:
                raise RuntimeError(
                    f"rollout: the cache of {name} has {len(cache)} blocks, expected {self._blocks}, which are copied "
                    "by their numbers; install the version of vLLM in requirements"
                )
        self._caches = kv_caches

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Copies)
        self._pairs = {}
        for group, pairs in zip(self._groups, connector_metadata.groups, strict=True):
            if pairs:
                sources, targets = torch.tensor(pairs).unbind(1)
                self._pairs |= dict.fromkeys(group.layer_names, (sources, targets))

    def wait_for_layer_load(self, layer_name: str) -> None:
        if pairs := self._pairs.get(layer_name):
            cache, (sources, targets) = self._caches[layer_name], pairs
            cache[targets] = cache[sources]

    def _do_nothing(self, *args, **kwargs) -> None:
        """Do nothing: nothing is loaded before a forward pass, nor kept outside of vLLM's cache."""

    start_load_kv = save_kv_layer = wait_for_save = _do_nothing


def _get_prompt(request: Request) -> tuple[int, ...]:
    return tuple(request.prompt_token_ids or ())
