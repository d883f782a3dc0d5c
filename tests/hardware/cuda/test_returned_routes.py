"""vLLM's own records of routed experts, emulated on a CPU: its second model runner, which keeps them, is not there.

What it has is bound by hand: its recorder to the CPU's routers, its store, and its scheduler's part. The engine then
reads the array that vLLM returns with a sample, by the code that a card would use.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.models import LANGUAGE_MODELS, VOCAB
from support.ranks.vlm_cases import make_images, make_prompts
from support.rollout_workers import Prompt, ask, draw, needs, start_engine

from engines.batch.samples import Completion, Sampling
from engines.config import VllmConfig
from engines.models.spec import ModelSpec
from hardware.megatron.form import NO_ROUTE
from hardware.vllm_versions import RETURNED_ROUTES
from rlworker.checks.tiny.models import make_tiny_model, make_tiny_text

pytestmark = [pytest.mark.usefixtures("by_value"), pytest.mark.large, needs(RETURNED_ROUTES)]
CONFIG = VllmConfig(max_new_tokens=12, max_model_len=192, max_num_seqs=64, kv_cache_mb=64, replay_routes=True)
SAMPLING = Sampling(3, 1.0, 12, (1,), ())


def bind_vllms_recorder(worker) -> None:
    """Let vLLM record and return experts from now on, in the place of our recorder."""
    from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector

    engine, under_way = worker.engine, []

    def bind() -> None:
        scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
        scheduler.connector._shares = False  # a card has no connector that copies a CPU's blocks
        scheduler.aux_output_connector = AuxOutputSchedulerConnector()
        engine._empty_caches()
        (runner,) = engine.llm.collective_rpc(lambda worker: worker.model_runner)
        recorder = AuxOutputWorkerConnector(
            vllm_config=runner.vllm_config, model=runner.get_model(), kv_cache_config=runner.kv_cache_config
        )
        execute, sample = runner.execute_model, runner.sample_tokens

        def execute_model(scheduled, *args, **kwargs):
            recorder.begin_step(scheduled.aux_output_connector_metadata)
            found = execute(scheduled, *args, **kwargs)
            if scheduled.total_num_scheduled_tokens:
                batch, counts = runner.input_batch, scheduled.num_scheduled_tokens
                step = SimpleNamespace(
                    req_ids=list(batch.req_ids),
                    query_start_loc_np=np.cumsum([0, *(counts[name] for name in batch.req_ids)]),
                    num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(batch.req_ids)].copy(),
                )
                under_way.append(recorder.prepare_output(step))
            return found

        def sample_tokens(*args, **kwargs):
            output = sample(*args, **kwargs)
            if under_way:
                pending, sampled = under_way.pop(), np.array([len(ids) for ids in output.sampled_token_ids])
                pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
                output.aux_output_connector_output = pending.process_output()
            return output

        runner.execute_model, runner.sample_tokens = execute_model, sample_tokens
        engine._returns_routes = True

    worker.loop.call(bind)


def sample_two_turns(worker, prompts: list[Prompt]) -> list[Completion]:
    """Sample prompts, each several times, and then a second turn after each prompt's first sample."""
    first = draw(worker, prompts, SAMPLING)
    context = [
        replace(prompt, token_ids=(*prompt.token_ids, *first[3 * place].token_ids.tolist(), 7, 8, 9))
        for place, prompt in enumerate(prompts)
    ]
    return [*first, *draw(worker, context, replace(SAMPLING, count=1))]


@pytest.fixture(params=["text", "images and states"])
def case(request, tmp_path):
    """A model, prompts of it, and settings."""
    if request.param == "text":
        settings = LANGUAGE_MODELS["qwen3_moe-dense"][1] | {"head_dim": 32, "eos_token_id": 2}
        folder = make_tiny_text(tmp_path / "model", "qwen3_moe", VOCAB, tied=False, **settings)
        prompts = [Prompt(tuple(range(20, 20 + length))) for length in (3, 33, 50, 70)]
        return ModelSpec.from_folder(folder), prompts * 2, CONFIG
    model = ModelSpec.from_folder(make_tiny_model(tmp_path / "model", "qwen3_5_moe"))
    (tmp_path / "images").mkdir()
    return model, make_prompts(model, make_images(tmp_path / "images")), CONFIG


def test_vllm_returns_what_our_recorder_records(cluster, case):
    model, prompts, config = case
    config = replace(config, vllm={"enable_prefix_caching": True})
    with start_engine(model, config) as worker:
        want = sample_two_turns(worker, prompts)
        ask(worker.__ray_call__, bind_vllms_recorder)
        got = sample_two_turns(worker, prompts)
    assert len(got) == 4 * len(prompts)
    for ours, theirs in zip(want, got, strict=True):
        assert np.array_equal(ours.token_ids, theirs.token_ids)
        assert theirs.routes.dtype == np.int16 and np.array_equal(ours.routes, theirs.routes)
    dense = [kind.options.experts is None for kind in model.kinds]
    assert all((one.routes[:, dense] == NO_ROUTE).all() and (one.routes[:, ~np.array(dense)] >= 0).all() for one in got)


def test_other_records_are_refused(tmp_path):
    from engines.vllm.completions import decode_routes

    settings = LANGUAGE_MODELS["qwen3_moe-dense"][1]
    model = ModelSpec.from_folder(make_tiny_text(tmp_path, "qwen3_moe", VOCAB, tied=False, **settings))
    routed = np.random.default_rng(0).integers(0, 8, (5, 4, 3)).astype(np.uint16)
    routes = decode_routes(routed, model)
    assert (routes[:, 0] == NO_ROUTE).all() and np.array_equal(routes[:, 1:], routed[:, 1:])
    for wrong in (None, routed[:, :3], routed[..., :2], routed[0]):
        with pytest.raises(RuntimeError, match=r"vLLM returned experts .* of a sample, expected \[tokens, 4, 3\]"):
            decode_routes(wrong, model)
    routed[4, 2, 1] = 8
    with pytest.raises(RuntimeError, match="vLLM returned expert 8 of a token, expected below 8"):
        decode_routes(routed, model)
