"""The loop that runs ahead, over real engines: weights that change under many samples, and an engine that is killed."""

import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.environments.runners import LIMITS as SHORT
from support.environments.runners import LocalPool, make_codec
from support.huggingface import list_weights, load_folder, measure_versions, nudge
from support.models import VOCAB
from support.rollout_workers import Prompt, ask, list_spans, send

from engines.batch.samples import Sampling
from engines.config import VllmConfig
from engines.models.spec import ModelSpec
from rlworker.checks.tiny.models import make_tiny_text
from rlworker.data.rows import Row
from rlworker.environments.reward import make_environment

pytestmark = [pytest.mark.usefixtures("by_value"), pytest.mark.large]
CONFIG = VllmConfig(max_new_tokens=256, max_model_len=512, max_num_seqs=160, kv_cache_mb=256, staleness=8)
UPDATES, ROWS, SAMPLES, TOKENS = 10, 16, 8, 120
LIMITS = replace(SHORT, sample_tokens=256, tokens=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("long")
    return make_tiny_text(place, "qwen2", VOCAB, eos_token_id=2, max_position_embeddings=512)


@pytest.fixture
def running(cluster, folder):
    """``running(engines)`` -> engines and a loop over them, whose texts are all worth nothing."""

    from rlworker.cluster.rollout_group import Rollouts
    from rlworker.rollouts.loop import RolloutLoop
    from rlworker.rollouts.requests import RequestQueue

    with ExitStack() as stack:

        def start(engines: int):
            rollouts = stack.enter_context(Rollouts("cpu", engines))
            rollouts.start(ModelSpec.from_folder(folder), CONFIG).wait()
            pool = LocalPool(make_environment(lambda text, row: 0.0), limits=LIMITS)
            queue = RequestQueue(rollouts, (1,))
            return rollouts, stack.enter_context(RolloutLoop(pool.environment, pool, rollouts, queue, make_codec()))

        yield start


def make_rows(count: int, seed: int = 0) -> list[Row]:
    ids = np.random.default_rng(seed).integers(20, 99, (count, 40))
    return [Row("", tuple(row), "", {}) for row in ids.tolist()]


def leave_caches(worker) -> None:
    worker.engine._empty_caches = lambda: None


def count_sampled(worker) -> int:
    states = worker.engine.llm.llm_engine.output_processor.request_states
    return worker.loop.call(lambda: max((one.detokenizer.num_output_tokens() for one in states.values()), default=0))


def update_all_along(rollouts, loop, folder: str, updates: int):
    """Draw, with updates spread over the draw: models by version, rows, completions, samples alive at each update."""
    (worker,), rows, alive = rollouts.workers, make_rows(ROWS), []
    model = load_folder(folder)
    models = {send(worker, list_weights(model)): load_folder(folder)}
    draw = loop.begin(rows, Sampling(SAMPLES, 1.0, TOKENS, (1,), ()))
    for number in range(updates):
        while ask(worker.__ray_call__, count_sampled) < (number + 1) * TOKENS // (updates + 1):
            time.sleep(0.005)
        nudge(model, seed=number)
        version = send(worker, list_weights(model), 20_000)
        models[version] = load_folder(folder)
        models[version].load_state_dict(model.state_dict())
        alive.append(ask(worker.measure_load)[1])
    groups = loop.wait(draw)
    prompts = [Prompt(group[0].row.prompt_ids) for group in groups for _ in range(SAMPLES)]
    return models, prompts, [completion for group in groups for one in group for completion in one.completions], alive


def test_each_segment_is_of_its_own_weights_over_many_updates(running, folder, measured):
    rollouts, loop = running(1)
    models, prompts, completions, alive = update_all_along(rollouts, loop, folder, UPDATES)
    assert min(alive) > 100 and len(alive) == UPDATES and len(models) == UPDATES + 1
    assert {*list_spans(completions)[0]} == {*models}
    assert min(len(completion.spans) for completion in completions) > UPDATES // 2
    found = measure_versions(models, prompts, completions)
    values = torch.cat([torch.as_tensor(each) for each in found.values()])
    measured({"mean": float(values.mean()), "largest": float(values.max()), "least alive": float(min(alive))})
    assert len(values) == ROWS * SAMPLES * TOKENS
    assert values.mean() <= 2e-6 and values.max() <= 1e-3
    assert max(float(each.mean()) for each in found.values()) <= 2e-6


def test_with_keys_kept_the_segments_after_the_first_are_nobodys(running, folder, measured):
    rollouts, loop = running(1)
    ask(rollouts.workers[0].__ray_call__, leave_caches)
    models, prompts, completions, alive = update_all_along(rollouts, loop, folder, 4)
    found = measure_versions(models, prompts, completions)
    means = [float(found[version].mean()) for version in sorted(found)]
    measured({"first": means[0], "least of the others": min(means[1:])})
    assert min(alive) > 100 and means[0] <= 2e-6 and min(means[1:]) > 1e-3


def test_what_goes_first_waits_for_a_seat_alone(running):
    """With more samples than the engine takes at once, the canary is answered long before those that wait."""
    _, loop = running(1)
    draw = loop.begin(make_rows(64), Sampling(8, 1.0, 100, (1,), ()))
    time.sleep(0.5)
    before = sum(group is not None for group in draw.groups)
    loop.sample_each(make_rows(1, 7), Sampling(1, 1.0, 4, (2,), ()))
    done = sum(group is not None for group in draw.groups)
    # Twenty groups have seats at a time, and end together: those that have one come before it, but no second twenty.
    assert done < min(before + 40, 64), f"{done} of 64 groups had come before it, {before} before it was asked"
    groups = loop.wait(draw)
    assert {len(completion.token_ids) for group in groups for one in group for completion in one.completions} == {100}


def test_an_engine_that_is_killed_loses_no_draw(running, folder):
    import ray

    rollouts, loop = running(2)
    lost: dict = {}
    rollouts.replace_lost(lost.update, lambda workers: None)
    rows = make_rows(24)
    draw = loop.begin(rows, Sampling(4, 1.0, 120, (1,), ()))
    killing = threading.Timer(0.5, ray.kill, rollouts.workers[1:])
    killing.start()
    groups = loop.wait(draw)
    killing.join()
    assert [group[0].row for group in groups] == rows and lost.keys() == {"rollout engine 1"}
    assert {len(completion.token_ids) for group in groups for one in group for completion in one.completions} == {120}
    prompts = [Prompt(group[0].row.prompt_ids) for group in groups for _ in range(4)]
    completions = [completion for group in groups for one in group for completion in one.completions]
    assert measure_versions({0: load_folder(folder)}, prompts, completions)[0].mean() <= 2e-6
