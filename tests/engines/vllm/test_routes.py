"""Experts that vLLM's worker records against the choices of transformers' gates, one sequence at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.huggingface import load_folder
from support.models import LANGUAGE_MODELS, VOCAB
from support.rollout_workers import Prompt, ask, draw, make_requests, needs

from engines.batch.samples import Completion, Sampling
from engines.config import VllmConfig
from engines.models.spec import ModelSpec
from hardware.megatron.form import NO_ROUTE
from hardware.vllm_versions import CPU_EXPERTS
from rlworker.checks.tiny.models import make_tiny_text

pytestmark = [pytest.mark.usefixtures("by_value"), pytest.mark.large, needs(CPU_EXPERTS)]
CONFIG = VllmConfig(max_new_tokens=40, max_model_len=192, max_num_seqs=64, kv_cache_mb=64, replay_routes=True)
SAMPLING = Sampling(4, 1.0, 40, (1,), ())
CHOSEN = 3
PROMPTS = [Prompt(tuple(range(20, 20 + length))) for length in (3, 33, 50, 70)]
"""In blocks of 32: of one, of one and its first token, and with a rest that samples copy from one another."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    settings = LANGUAGE_MODELS["qwen3_moe-dense"][1] | {"head_dim": 32, "eos_token_id": 2}
    return make_tiny_text(tmp_path_factory.mktemp("routes") / "model", "qwen3_moe", VOCAB, tied=False, **settings)


def list_scores(model, ids: np.ndarray) -> torch.Tensor:
    """List the logits ``[L, layers with experts, experts]`` of a sequence's gates by transformers."""
    found: list[torch.Tensor] = []
    gates = [gate for name, gate in model.named_modules() if name.endswith(".mlp.gate")]
    hooks = [gate.register_forward_hook(lambda gate, _, out: found.append(out[0])) for gate in gates]
    with torch.no_grad():
        model(torch.from_numpy(ids.astype(np.int64))[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1)


def check(folder: str, prompts: list[tuple[int, ...]], completions: list[Completion]) -> None:
    """Check the experts of every token but the last of each sample: no other has a larger logit, beyond rounding."""
    model = load_folder(folder)
    for place, completion in enumerate(completions):
        ids = np.concatenate([prompts[place * len(prompts) // len(completions)], completion.token_ids])
        assert completion.routes.dtype == np.int16 and completion.routes.shape == (len(ids) - 1, 4, CHOSEN)
        assert (completion.routes[:, 0] == NO_ROUTE).all(), "a layer without experts"
        scores, routes = list_scores(model, ids[:-1]), torch.from_numpy(completion.routes[:, 1:]).long()
        chosen = torch.zeros_like(scores).scatter_(-1, routes, 1.0)
        assert (chosen.sum(-1) == CHOSEN).all(), "an expert comes twice"
        least, next_best = scores.masked_fill(chosen == 0, torch.inf), scores.masked_fill(chosen == 1, -torch.inf)
        lead = least.amin(-1) - next_best.amax(-1)
        assert float(lead.min()) > -1e-4 and float(lead.median()) > 0.01, place


@pytest.fixture
def start(cluster, model):
    from rlworker.cluster.rollout_group import Rollouts

    with Rollouts("cpu", 1) as rollouts:
        yield lambda config: rollouts.start(ModelSpec.from_folder(model), config).wait().workers[0]


CASES = {
    "shared prompts": {},
    "preempted samples": {"kv_cache_mb": 1},
    "prompts in chunks": {"vllm": {"long_prefill_token_threshold": 24}},
    "two devices": {"tp": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_choices_of_every_token(start, model, case):
    worker = start(replace(CONFIG, **CASES[case]))
    completions = draw(worker, PROMPTS * 4, SAMPLING)
    check(model, [prompt.token_ids for prompt in PROMPTS * 4], completions)
    assert draw(worker, PROMPTS, replace(SAMPLING, temperature=0.0, count=1))[0].routes is None
    held = ask(worker.__ray_call__, count_held)
    assert held == 0, "what is read or not wanted is forgotten"


def count_held(worker) -> int:
    return sum(map(len, worker.engine.llm.collective_rpc(lambda worker: [*worker._routes._of_samples])))


def test_a_second_turn_has_the_experts_of_its_cached_prefix(start, model):
    worker, once = start(CONFIG), replace(SAMPLING, count=1)
    (first,) = draw(worker, PROMPTS[2:3], once)
    context = (*PROMPTS[2].token_ids, *first.token_ids.tolist(), 7, 8, 9)
    (request,) = make_requests([Prompt(context)], once)

    def sample(worker):
        def run():
            worker.engine.add_request("turn", request)
            while not (outputs := worker.engine.step()):
                pass
            return outputs[0].num_cached_tokens, worker.engine.read_output(request, outputs[0])

        return worker.loop.call(run)

    cached, completions = ask(worker.__ray_call__, sample)
    assert cached >= 64, "two blocks of it are not computed again"
    check(model, [context], completions)
