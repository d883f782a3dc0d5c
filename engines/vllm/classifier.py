"""Classifiers on vLLM's pooling runner: raw logits of sequences, or of every token."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm import LLM, PoolingParams
from vllm.config import PoolerConfig
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt

from engines.config import VllmConfig
from engines.config.served import ClassifierSpec
from engines.interfaces import Tag
from engines.vllm.processes import tie_workers
from engines.vllm.sleep import Sleep
from hardware.platform import Platform

_OF_SAMPLING = ("kv_transfer_config",)
"""Settings of a platform's rollouts that serve sampling alone."""


class ClassifierEngine:
    """Gives the logits of a classifier as transformers does. The platform's rollout environment must be set before.

    Args:
        spec: the classifier, read from its folder. config: sizes of the engine.
        takes_turns: whether other engines use the same devices in turn, so that it has to sleep.
    """

    def __init__(self, spec: ClassifierSpec, config: VllmConfig, platform: Platform, takes_turns: bool = False):
        self.spec = spec
        if config.kv_cache_mb:
            os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # on a CPU it would have the last word
        sleeps = takes_turns and platform.can_sleep
        own = {name: value for name, value in platform.rollout_settings.items() if name not in _OF_SAMPLING}
        settings: dict[str, Any] = own | dict(
            model=spec.folder,
            runner="pooling",
            config_format="hf",
            load_format="safetensors",
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            tensor_parallel_size=config.tp,
            distributed_executor_backend="mp" if config.tp > 1 else "uni",
            enable_sleep_mode=sleeps,
            worker_extension_cls="engines.vllm.worker.WeightSyncExtension",
            disable_log_stats=True,
            # Of several tasks that vLLM could do by a model it takes another, and refuses this one then.
            pooler_config=PoolerConfig(task=spec.task, use_activation=False),
        )
        if config.kv_cache_mb:
            settings["kv_cache_memory_bytes"] = config.kv_cache_mb * 2**20
        self.llm = LLM(**settings)
        self._sleep = Sleep(self.llm, sleeps)
        if config.tp > 1:
            tie_workers(self.llm)

    def compute_logits(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Compute the logits ``[T, labels]`` float32 of each prompt, of a sequence classification ``[1, labels]``.

        The same prompts give the same numbers, bit for bit, after any earlier ones.
        """
        self._sleep.require_weights("compute_logits")
        # What was asked before may not decide what shares a forward pass: a new engine was not asked the same.
        self.llm.llm_engine.reset_prefix_cache()
        inputs = [TokensPrompt(prompt_token_ids=list(ids)) for ids in prompts]
        params = PoolingParams(use_activation=False)  # vLLM would squash logits to probabilities
        outputs = self.llm.encode(inputs, params, pooling_task=self.spec.task, use_tqdm=False)
        found = [output.outputs.data.float().numpy() for output in outputs]
        return [logits.reshape(-1, logits.shape[-1]) for logits in found]

    def sleep(self, level: int) -> None:
        """Free the memory of the devices; level 1 keeps the weights on the host."""
        self._sleep.sleep(level)

    def wake(self, tags: Sequence[Tag]) -> None:
        """Allocate the parts named by ``tags`` on the devices again."""
        self._sleep.wake(tags)

    def close(self) -> None:
        """Stop vLLM and free its memory, as far as this process can; another engine may then start in it."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()
