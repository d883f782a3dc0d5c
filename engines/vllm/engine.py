"""The rollout engine: vLLM in this process and one for each of several devices, with weights replaced in place."""

import os
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any, cast

from vllm import LLM
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from engines.batch.balance import split_by_budget
from engines.batch.samples import Completion, Request
from engines.config import VllmConfig
from engines.config.rollout import find_weight_way
from engines.interfaces import Tag
from engines.models.spec import ModelSpec
from engines.vllm.completions import VersionCounter, cut_routes, decode_routes, read_completion, read_scores
from engines.vllm.prompts import make_params, make_prompt
from engines.vllm.read_back import merge_readings
from engines.vllm.sleep import Sleep
from engines.weight_digest import DigestPlan
from engines.weight_sync import PieceJoiner, WeightBucket, share_bucket
from hardware.attention.rollouts import ROUTE_ARGUMENTS, find_needed_arguments, find_rollout_backend
from hardware.platform import HOST, Platform
from hardware.vllm_versions import CACHE_MANAGER


def _tie_alike(config, *, tied: bool):
    """Tie a model's language model in its settings, or not, as the trainer does.

    transformers saves that once, for the whole, or leaves it out; vLLM 0.32 asks the language model's own settings, and
    would leave an output layer that has no weight of its own as it was born.
    """
    if hasattr(config, "tie_word_embeddings"):  # vLLM also asks with an empty one
        config.get_text_config().tie_word_embeddings = tied
    return config


def _make_settings(model: ModelSpec, config: VllmConfig, worker: str, sleeps: bool) -> dict[str, Any]:
    """Make the arguments of vLLM's LLM."""
    settings: dict[str, Any] = dict(
        model=model.folder,
        # The trainers read these files too, even if the folder has others.
        config_format="hf",
        load_format="safetensors",
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        tensor_parallel_size=config.tp,
        # One process for each device beside this one, or none: within a placement group of Ray's vLLM would take Ray.
        distributed_executor_backend="mp" if config.tp > 1 else "uni",
        # log_softmax(logits / temperature), as the trainer computes it.
        logprobs_mode="processed_logprobs",
        max_logprobs=model.vocab,  # a limit on requests, which sizes no buffer
        worker_cls=worker,
        enable_sleep_mode=sleeps,
        worker_extension_cls="engines.vllm.worker.WeightSyncExtension",
        disable_log_stats=True,
        # Prompts come as ids and leave as ids; text is the controller's business. vLLM's processors of images
        # will not start without a tokenizer all the same.
        skip_tokenizer_init=model.vision is None and not config.stop,
    )
    if model.vision:
        # Images are decoded when they are asked for and kept by nobody: a cache would have a limit of its own.
        knows_videos = model.vision.video_token is not None
        others = {"video": 0} if knows_videos and model.vision.tower.no_videos else {}
        tie = partial(_tie_alike, tied=model.tied)
        settings |= {"mm_processor_cache_gb": 0, "limit_mm_per_prompt": others, "hf_overrides": tie}
        # Newer versions normalise pixels on the device, by other numbers if preprocessor_config.json lacks them.
        settings |= {name: False for name in ("mm_device_do_normalize",) if name in EngineArgs.__dataclass_fields__}
    for mixer in set(model.mixers):
        settings |= mixer.rollout_settings
    if any(rule.images for rule in model.rules):
        # A chunk may end within an image, even where vLLM is asked to keep images whole (vLLM issue 52306).
        # Without chunks vLLM makes room for the longest sequence in a forward pass by itself.
        settings["enable_chunked_prefill"] = False
    if config.staleness:
        settings["scheduling_policy"] = "priority"  # requests that an update waits for go first
    if config.kv_cache_mb:
        settings["kv_cache_memory_bytes"] = config.kv_cache_mb * 2**20
    return settings


def _bind_cache_manager(llm: LLM) -> None:
    """Give the platform's connector the manager of the KV cache, as newer versions of vLLM do by themselves."""
    scheduler = cast(Any, llm.llm_engine.engine_core).engine_core.scheduler
    if not CACHE_MANAGER.is_there and hasattr(scheduler.connector, "bind_kv_cache_manager"):
        scheduler.connector.bind_kv_cache_manager(scheduler.kv_cache_manager)


class VllmEngine:
    """Samples completions with the log-probability of every token. The platform's rollout environment must be set
    before.

    Args:
        model: read from ``model.folder``; its weights count as version 0. config: settings of the engine.
        takes_turns: whether trainers use the same devices in turn, so that it has to sleep.

    Raises:
        ValueError: vLLM has no backend here that computes the model's attention rules.
        RuntimeError: vLLM took another backend than the chosen one.
    """

    def __init__(self, model: ModelSpec, config: VllmConfig, platform: Platform, takes_turns: bool = False):
        self.model, self.config = model, config
        self.version = self._newest = 0
        self._names: set[str] = set()
        self._joiner: PieceJoiner | None = None  # of the update that has begun
        backend = find_rollout_backend(platform.rollout_backends, model.rules, config.attention_override)
        worker = platform.find_rollout_worker(backend)
        if config.kv_cache_mb:
            os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # on a CPU it would have the last word
        sleeps = takes_turns and platform.can_sleep
        arguments = platform.rollout_settings | _make_settings(model, config, worker.name, sleeps)
        arguments |= find_needed_arguments(backend, model.rules)
        self.weight_way = find_weight_way(config, platform, takes_turns)
        if self.weight_way != HOST:
            arguments["weight_transfer_config"] = WeightTransferConfig(backend=self.weight_way)
        self._returns_routes = config.replay_routes and platform.returns_routes
        if self._returns_routes:
            arguments |= ROUTE_ARGUMENTS
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # which alone has the records
        self.llm = LLM(**(arguments | cast(dict[str, Any], config.vllm)))
        _bind_cache_manager(self.llm)
        self._versions = VersionCounter(self.llm.llm_engine, self.version)
        self._sleep = Sleep(self.llm, sleeps)
        if config.tp > 1:
            from engines.vllm.processes import tie_workers  # an engine of one device has no processes

            tie_workers(self.llm)
        if config.top_k:
            self.llm.collective_rpc("break_ties")
        if config.replay_routes and not self._returns_routes:
            assert model.experts, "checked with the settings"
            self.llm.collective_rpc("record_routes", args=(model.layers, model.experts.chosen))
        for parts in self.llm.collective_rpc("list_parts"):
            # an upstream change may silently ignore the parts that a worker installs
            if worker.parts and tuple(parts) != worker.parts:
                self.close()
                raise RuntimeError(
                    f"rollout: vLLM computes attention and samples with {parts}, expected {list(worker.parts)} for "
                    f"{backend}; this version of vLLM does not take what was registered with it: install the one in "
                    "requirements"
                )

    def close(self) -> None:
        """Stop vLLM and free its memory, as far as this process can; another engine may then start in it."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()

    def sample(self, requests: Sequence[Request], seed: int) -> list[Completion]:
        """Sample the completions of all requests, and return them in order once the last is done.

        Requests wait if there is no memory for their decoded images. The same requests, weights and seed give the same
        tokens and logprobs, bit for bit, after any earlier requests.

        Raises:
            ValueError: an image cannot be read.
            RuntimeError: vLLM made other tokens of the images than the trainer does, or other requests are running.
        """
        self._sleep.require_weights("sampling")
        if self.llm.llm_engine.has_unfinished_requests():
            raise RuntimeError("rollout: sample() needs the engine for itself; collect or abort other requests first")
        # What was asked before may not decide which tokens share a forward pass: a resumed run was not asked the same.
        self._empty_caches()
        self.seed(seed)
        # vLLM takes a prompt once for all of its completions; so do single requests that follow one another and are
        # equal. Of greedy ones it refuses several completions, and a prompt has its score once.
        runs: list[list[Request]] = []
        for request in requests:
            asked = request.sampling
            stands_alone = asked.count > 1 or asked.temperature == 0 or asked.scores_prompt
            if stands_alone or not runs or request != runs[-1][0]:
                runs.append([])
            runs[-1].append(request)
        completions, costs = [], [self.count_image_bytes(run[0]) for run in runs]
        for part in split_by_budget(costs, self.config.image_memory_mb * 2**20):
            counts = (sum(request.sampling.count for request in run) for run in runs[part])
            params = [make_params(run[0].sampling, n, self.model, self.config) for run, n in zip(runs[part], counts)]
            prompts = [make_prompt(run[0], self.model) for run in runs[part]]
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
            for run, output in zip(runs[part], outputs, strict=True):
                completions += self.read_output(run[0], output)
            del prompts, outputs  # their images, before the next are decoded
        return completions

    def seed(self, seed: int) -> None:
        """Draw from the random numbers of ``seed`` from now on."""
        self.llm.collective_rpc("seed_sampler", args=(seed,))

    def count_image_bytes(self, request: Request) -> int:
        """Estimate the bytes of a request's images while they are decoded."""
        vision = self.model.vision
        return sum(image.nbytes(vision) for image in request.images) if vision else 0

    def add_request(self, name: str, request: Request) -> None:
        """Begin to sample a request under ``name``, by which ``step`` returns it when it has finished.

        Raises:
            ValueError: the prompt is too long, or an image cannot be read.
        """
        self._sleep.require_weights("sampling")
        params = make_params(request.sampling, request.sampling.count, self.model, self.config)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        place = -int(request.goes_first and self.config.staleness > 0)
        self.llm.llm_engine.add_request(name, make_prompt(request, self.model), params, priority=place)

    def count_running(self) -> int:
        """Count the completions that have begun and not finished."""
        return self.llm.llm_engine.get_num_unfinished_requests()

    def abort_requests(self, names: Sequence[str]) -> None:
        """Abort requests and free their KV cache."""
        self.llm.llm_engine.abort_request(list(names))
        self._versions.forget(names)
        self._take_routes(names)

    def step(self) -> list[RequestOutput]:
        """Compute one token of every running request; returns the requests that finished."""
        return cast(list[RequestOutput], self.llm.llm_engine.step())

    def finish_batches(self) -> list[RequestOutput]:
        """Wait for forward passes that vLLM has scheduled ahead, before new weights are loaded; returns what ``step``
        does.

        On a CPU none is ahead. On devices (``async_scheduling``) vLLM begins a step before it reads the tokens of the
        last step. It would label those tokens with the version of weights that came in between.
        """
        engine, outputs = self.llm.llm_engine, []
        batches = cast(Any, engine.engine_core).engine_core.batch_queue
        if batches:
            engine.sleep(level=0, mode="keep")  # schedules nothing new; running requests stay
            while batches:
                outputs += self.step()
            engine.wake_up(["scheduling"])
        return outputs

    def read_output(self, request: Request, output: RequestOutput) -> list[Completion]:
        """Read the completions of a request.

        Raises:
            RuntimeError: vLLM made other tokens of the prompt than the trainer does.
        """
        seen = output.prompt_token_ids or []
        if tuple(seen) != tuple(request.token_ids):
            place = request.images[0].place if request.images else "a prompt without images"
            raise RuntimeError(
                f"rollout: {place}: vLLM made {len(seen)} tokens of the prompt, the trainer "
                f"{len(request.token_ids)}, or others; both must read the same preprocessor_config.json"
            )
        routes = self._take_routes([output.request_id])
        lengths = [(sample, len(sample.token_ids)) for sample in output.outputs]
        spans = [self._versions.take(output.request_id, sample.index, length) for sample, length in lengths]
        self._versions.forget([output.request_id])
        if output.prompt_logprobs is not None:
            (version, _), *_ = spans[0]  # of the id that was sampled behind the prompt
            return [read_scores(output, version)]
        completions = [read_completion(sample, span) for sample, span in zip(output.outputs, spans, strict=True)]
        if not self.config.replay_routes or request.sampling.temperature == 0:
            return completions
        keys = [(output.request_id, sample.index) for sample in output.outputs]
        if self._returns_routes:
            found = [decode_routes(sample.routed_experts, self.model) for sample in output.outputs]
            routes = dict(zip(keys, found, strict=True))
        return [cut_routes(one, len(seen), routes[key]) for one, key in zip(completions, keys, strict=True)]

    def _take_routes(self, names: Sequence[str]) -> dict[tuple[str, int], Any]:
        """Take the experts of requests, by request and number of the sample, from a worker; all of them have the
        same. Where vLLM returns them with a sample none is kept."""
        if not self.config.replay_routes or self._returns_routes:
            return {}
        return self.llm.collective_rpc("take_routes", args=(names,))[0]

    def _empty_caches(self) -> None:
        """Empty the prefix cache and the cache of image features. Running requests recompute their KV cache."""
        # Keys before features: a request that runs gives its features back with its keys.
        if not self.llm.llm_engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("rollout: vLLM did not empty the prefix cache; its version is not the pinned one")
        if self.model.vision:
            self.llm.llm_engine.reset_encoder_cache()

    def rewind(self, version: int) -> None:
        """Accept ``version`` as the next update, even if it is older, since the trainer went back to a checkpoint."""
        self._newest = version - 1

    def sleep(self, level: int) -> None:
        """Free the memory of the devices; level 1 keeps the weights on the host, 2 drops them."""
        self._sleep.sleep(level)

    def wake(self, tags: Sequence[Tag]) -> None:
        """Allocate the parts named by ``tags`` on the devices again."""
        self._sleep.wake(tags)

    def load_weights(self, bucket: WeightBucket, version: int, last: bool) -> None:
        """Load one bucket; the ``last`` ends the update, empties the prefix cache and sets ``version``.

        A first bucket begins an update and drops an unfinished one.

        Raises:
            ValueError: the bucket is damaged, its version is not newer than the engine's, its update did not begin
                here, or the buckets together are not exactly the model's weights.
        """
        self._prepare_update(version)
        bucket.check()
        if bucket.first:
            self._names, self._joiner = set(), PieceJoiner()
            self.llm.collective_rpc("begin_sync")
        elif not self._joiner:
            text = f"weight sync: a bucket of version {version} came to an engine that has not got the first one; send "
            raise ValueError(f"{text}the update again from its first bucket")
        if whole := cast(PieceJoiner, self._joiner).join(bucket):
            if self.config.tp == 1:
                self.llm.collective_rpc("take_weights", args=(whole.tensors(),))
            else:
                with share_bucket(whole) as shared:
                    self.llm.collective_rpc("take_shared_weights", args=(shared,))
            self._names |= {name for name, *_ in whole.entries}  # failed weights are then missing at the end
        if last:
            names, self._names, self._joiner = self._names, set(), None
            self._end_update(version, names, lambda: self.llm.collective_rpc("end_sync"))

    def begin_transfer(self, version: int) -> None:
        """Begin an update by vLLM's weight transfer, which drops an unfinished one; ValueError where the version is not
        newer than the engine's."""
        self._prepare_update(version)
        self._joiner = None
        self.llm.collective_rpc("begin_transfer")

    def transfer(self, step: str, info: Any) -> None:
        """Call ``init_weight_transfer_engine`` of vLLM's workers, which join a sender, or ``update_weights``, which
        receive weights; RuntimeError tells what one raised."""
        if failures := [text for text in self.llm.collective_rpc("attempt", args=(step, info)) if text]:
            raise RuntimeError(failures[0])

    def end_transfer(self, version: int, checksums: Mapping[str, int]) -> None:
        """End an update by vLLM's weight transfer as the last bucket ends others.

        Args:
            checksums: HF name -> ``checksum`` of every tensor that was sent.

        Raises:
            RuntimeError: weights were damaged or lost on the way. ValueError: they are not exactly the model's.
        """
        self._end_update(version, checksums.keys(), lambda: self.transfer("end_transfer", checksums))

    def _prepare_update(self, version: int) -> None:
        """Raise ValueError where ``version`` is not newer than the engine's."""
        if version <= self._newest:
            raise ValueError(f"weight sync: version {version} was sent to an engine that has version {self._newest}")
        self._sleep.require("load_weights", "weights")

    def _end_update(self, version: int, names: Set[str], end: Callable[[], Any]) -> None:
        """End an update by ``end``, if the weights that came are exactly the model's."""
        expected = self.model.list_hf_names()
        if names != expected:
            missing, extra = (sorted(x)[:5] for x in (expected - names, names - expected))
            raise ValueError(f"weight sync: version {version} came without {missing} and with unknown {extra}")
        end()
        self._empty_caches()  # they hold results of older weights
        self._versions.change(version)
        self.version, self._newest, self._sleep.has_weights = version, version, True

    def digest_weights(self, plan: DigestPlan) -> dict[str, int | None]:
        """Return name -> digest of the weights that vLLM computes with; None for a tensor that cannot be read."""
        self._sleep.require_weights("digest_weights")
        shapes = {name: self.model.find_hf_shape(name) for name in sorted(self.model.list_hf_names())}
        parts = self.llm.collective_rpc("digest_weights", args=(shapes, self.model.tied, plan))
        return merge_readings(parts, shapes)
