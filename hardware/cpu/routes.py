"""Records the experts that every token chose in vLLM's CPU worker.

vLLM 0.32 returns them by itself with its second model runner alone, which needs Triton.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.v1.kv_cache_interface import MambaSpec

from hardware.megatron.form import NO_ROUTE

Sample = tuple[str, int]
"""Name of a request, and number of one of its samples."""


class RouteRecorder:
    """Keeps the experts of each slot of the KV cache, and of each sample from its first token on.

    A prompt that vLLM finds in its prefix cache, or whose blocks ``SharedPrompts`` copies, is not computed again: its
    experts are those of the slots. A sample that is computed a second time, after a preemption or under new weights,
    keeps the experts by which its tokens were sampled.

    Args:
        runner: vLLM's model runner, once it has its KV cache. layers: layers of the model. chosen: experts of a token.
    """

    def __init__(self, runner: Any, layers: int, chosen: int):
        self._runner, groups = runner, runner.kv_cache_config.kv_cache_groups
        # States are kept of some tokens alone, keys of all: a slot stands for a token in a group of layers with keys.
        self._group = next(i for i, group in enumerate(groups) if not isinstance(group.kv_cache_spec, MambaSpec))
        self._block = groups[self._group].kv_cache_spec.block_size
        shape = layers, chosen
        self._of_slots = np.full((runner.kv_cache_config.num_blocks * self._block, *shape), NO_ROUTE, np.int16)
        self._of_samples: dict[Sample, list[np.ndarray]] = {}
        self._of_pass: dict[int, Tensor] = {}  # layer -> [tokens, k]
        for module in runner.get_model().modules():
            if isinstance(module, MoERunner):
                assert isinstance(module.router, BaseRouter), "the pinned vLLM has no other on a CPU"
                module.router.set_capture_fn(partial(self._of_pass.__setitem__, module.layer_id))
        self._execute = runner.execute_model
        runner.execute_model = self._execute_and_record

    def take(self, names: Iterable[str]) -> dict[Sample, np.ndarray]:
        """Return and forget the experts of the samples of some requests: ``[tokens, layers, k]`` int16 each."""
        names = {*names}
        taken = [sample for sample in self._of_samples if sample[0] in names]
        return {sample: np.concatenate(self._of_samples.pop(sample)) for sample in taken}

    def _execute_and_record(self, scheduled, *args, **kwargs):
        self._of_pass.clear()
        found = self._execute(scheduled, *args, **kwargs)
        if self._of_pass:
            self._record(scheduled)
        return found

    def _record(self, scheduled) -> None:
        batch, counts = self._runner.input_batch, scheduled.num_scheduled_tokens
        names = batch.req_ids
        firsts = batch.num_computed_tokens_cpu[: len(names)].tolist()
        table = batch.block_table[self._group]
        slots = []  # of each request, one for each of its tokens so far
        for name, first, blocks in zip(names, firsts, table.get_numpy_array(), strict=False):
            places = np.arange(first + counts[name])
            slots.append(blocks[places // table.block_size] * table.block_size + places % table.block_size)
        written = np.concatenate([every[first:] for every, first in zip(slots, firsts)])
        experts = np.full((len(written), *self._of_slots.shape[1:]), NO_ROUTE, np.int16)
        for layer, chosen in self._of_pass.items():
            experts[:, layer] = chosen[: len(written)].numpy()
        self._of_slots[written] = experts
        groups = getattr(scheduled.kv_connector_metadata, "groups", None)
        if groups and groups[self._group]:
            sources, targets = np.asarray(groups[self._group]).T
            blocks = self._of_slots.reshape(-1, self._block, *self._of_slots.shape[1:])
            blocks[targets] = blocks[sources]
            self._of_slots[written] = experts  # a copy may have gone over the last token of its own
        for name, every in zip(names, slots, strict=True):
            parts = self._of_samples.setdefault(_read_name(name), [])
            parts.append(self._of_slots[every[sum(map(len, parts)) :]])
            if (unknown := (parts[-1] == NO_ROUTE).all((1, 2))).any():
                raise RuntimeError(
                    f"rollout: the experts of {int(unknown.sum())} tokens of a cached prompt are not known; set "
                    "--rollout.vllm enable_prefix_caching False"
                )


def _read_name(name: str) -> Sample:
    """Read vLLM's name of a sample: ``number_request-random``, or ``request-random`` of a single one."""
    number, found, rest = name.rpartition("_")
    request, dash, _ = rest.rpartition("-")
    assert dash, f"vLLM names a sample {name!r}"
    return request, int(number) if found else 0


def install(runner: Any, layers: int, chosen: int) -> RouteRecorder:
    """Record the experts of all tokens from now on, as ``RouteRecorder``."""
    return RouteRecorder(runner, layers, chosen)
