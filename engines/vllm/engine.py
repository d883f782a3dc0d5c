"""The rollout engine: vLLM in this process, with weights replaced in place."""

import os
from collections.abc import Sequence

from vllm import LLM, SamplingParams

from engines.batch import Completion
from engines.config import VllmConfig
from engines.interfaces import Sampling
from engines.models import ModelSpec
from engines.weight_sync import WeightBucket


class VllmEngine:
    """Samples completions with the log-probability of every token. The platform's rollout environment must be set.

    Args:
        model: read from ``model.folder``; its weights count as version 0.
    """

    def __init__(self, model: ModelSpec, config: VllmConfig):
        self.model, self.config = model, config
        self.version = 0
        self._names: set[str] = set()
        settings = dict(
            model=model.folder,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            enforce_eager=True,
            # log_softmax(logits / temperature): what the trainer computes.
            logprobs_mode="processed_logprobs",
            worker_extension_cls="engines.vllm.worker.WeightSyncExtension",
            disable_log_stats=True,
            # Prompts come as ids and leave as ids; text is the controller's business.
            skip_tokenizer_init=True,
        )
        if config.kv_cache_mb:
            settings["kv_cache_memory_bytes"] = config.kv_cache_mb * 2**20
            os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # on a CPU it would have the last word
        self.llm = LLM(**settings, **config.vllm)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        # What was asked before may not decide which tokens share a forward pass: a resumed run was not asked the same.
        self._empty_prefix_cache()
        self.llm.collective_rpc("seed_sampler", args=(sampling.seed,))
        greedy = sampling.temperature == 0
        params = SamplingParams(
            n=sampling.count,
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            logprobs=None if greedy else 0,
            flat_logprobs=not greedy,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # vLLM would stop at the end tokens of generation_config.json too
            detokenize=False,
        )
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return [[self._completion(sample) for sample in output.outputs] for output in outputs]

    def _completion(self, sample) -> Completion:
        tokens = list(sample.token_ids)
        # One entry a position: with logprobs=0 vLLM reports the sampled token alone.
        logprobs = [] if sample.logprobs is None else list(sample.logprobs.logprobs)
        if sample.logprobs is not None and list(sample.logprobs.token_ids) != tokens:
            raise RuntimeError("rollout: vLLM reported logprobs of other tokens than it sampled")
        return Completion(tokens, logprobs, sample.finish_reason == "stop", self.version)

    def _empty_prefix_cache(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("rollout: the prefix cache could not be emptied; are requests still running?")

    def load_weights(self, bucket: WeightBucket, version: int, last: bool) -> None:
        """Take one bucket; ``last`` finishes the update, empties the prefix cache and makes the weights ``version``.

        Raises:
            ValueError: the bucket is damaged or not newer than what is here, or the buckets together are not exactly
                the model's weights.
        """
        if version <= self.version:
            raise ValueError(f"weight sync: version {version} was sent to an engine that has version {self.version}")
        weights = bucket.tensors()
        if not self._names:
            self.llm.collective_rpc("begin_sync")
        self._names |= {name for name, _ in weights}
        self.llm.collective_rpc("take_weights", args=(weights,))
        if not last:
            return
        names, self._names = self._names, set()
        if names != self.model.all_hf_names():
            missing, extra = (
                sorted(x)[:5] for x in (self.model.all_hf_names() - names, names - self.model.all_hf_names())
            )
            raise ValueError(f"weight sync: version {version} came without {missing} and with unknown {extra}")
        self.llm.collective_rpc("end_sync")
        self._empty_prefix_cache()  # its keys and values come from the old weights
        self.version = version
