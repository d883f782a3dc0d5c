"""vLLM with top_k, top_p, stop texts and a minimum length: the ids that it keeps, and logprobs over them."""

from dataclasses import replace
from string import ascii_lowercase, digits
from types import SimpleNamespace

import pytest
import torch
from support.huggingface import list_weights, load_folder, make_batch
from support.rollout_workers import Prompt, draw, send, start_engine

from engines.batch.samples import Sampling
from engines.config import VllmConfig
from engines.models.spec import ModelSpec
from recipes.common.addition import make_model, make_tokenizer
from rlworker.checks.reference.huggingface import iterate_logits
from rlworker.environments.codec import Codec
from rlworker.rollouts.trajectory import replay_support

pytestmark = [pytest.mark.usefixtures("by_value"), pytest.mark.large]
TEMPERATURE, TOP_K, TOP_P, LEAST, MOST, EOS = 0.7, 20, 0.9, 4, 16, 2
STOPS = tuple(first + second for first in digits for second in ascii_lowercase)
CONFIG = VllmConfig(
    temperature=TEMPERATURE,
    top_k=TOP_K,
    top_p=TOP_P,
    min_new_tokens=LEAST,
    stop=STOPS,
    max_new_tokens=MOST,
    max_model_len=64,
    max_num_seqs=64,
    kv_cache_mb=64,
)
PROMPTS = [Prompt((40, 41, 42)), Prompt((50,)), Prompt((60, 61, 62, 63, 64))]


@pytest.fixture(scope="module")
def drawn(cluster, tmp_path_factory):
    """An engine's completions of a model with likely and unlikely ids, the model, and the engine."""
    folder = str(make_model(tmp_path_factory.mktemp("model"), 0))
    model = load_folder(folder)
    with start_engine(ModelSpec.from_folder(folder), CONFIG) as worker:
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(3)  # the output layer too: some ids become likely
        send(worker, list_weights(model))
        completions = draw(worker, PROMPTS, Sampling(32, TEMPERATURE, MOST, (1,), (EOS,)))
        yield completions, model, worker


@torch.no_grad()
def test_logprobs_and_kept_ids_against_huggingface(drawn, measured):
    """Of each place: ids whose probability before them is below top_p, among the likeliest top_k, in float64."""
    completions, model, _ = drawn
    batch = replay_support(make_batch(PROMPTS, completions))
    logits = torch.cat([part for _, part in iterate_logits(model, batch)]).double() / TEMPERATURE
    logprobs, other_sets = [], 0
    starts = (~batch.mask) | (batch.positions == 0)
    since = torch.zeros(batch.num_tokens, dtype=torch.long)  # sampled targets of the completion before this one
    for place in range(1, batch.num_tokens):
        since[place] = 0 if starts[place] or starts[place - 1] else since[place - 1] + 1
    for place in batch.mask.nonzero()[:, 0].tolist():
        row = logits[place].clone()
        if since[place] < LEAST:
            row[EOS] = -torch.inf
        values, ids = row.sort(descending=True)
        p = values[:TOP_K].softmax(0)
        want = {*ids[:TOP_K][p.cumsum(0) - p < TOP_P].tolist()}
        kept = batch.support[place][batch.support[place] >= 0].long()
        other_sets += want != {*kept.tolist()}
        logprobs.append(row[kept].log_softmax(0)[kept == batch.targets[place]][0])
    differences = (batch.rollout_logprobs[batch.mask].double() - torch.stack(logprobs)).abs()
    measured({"mean": float(differences.mean()), "max": float(differences.max()), "other sets": other_sets})
    assert differences.mean() <= 1e-6 and differences.max() <= 1e-5
    assert other_sets <= len(differences) / 200, "of ids that are next to equally likely"
    assert 1 < batch.support.shape[1] <= TOP_K and (batch.support[batch.mask] < 0).any(), "top_p keeps fewer"


def test_a_stop_text_ends_a_completion_and_is_left_out_of_its_text(drawn):
    """A stop text that is complete before ``LEAST`` tokens ends nothing, and stays in the text."""
    completions, *_ = drawn
    codec, stopped = Codec(make_tokenizer(), (EOS,), stop_texts=STOPS), 0
    for one, read in zip(completions, codec.read_samples([one.token_ids for one in completions]), strict=True):
        text, early = (codec.decode(ids) for ids in (one.token_ids, one.token_ids[:LEAST]))
        starts = [place for stop in STOPS if (place := text.find(stop, max(0, len(early) - 1))) >= 0]
        assert one.finished == (bool(starts) or one.token_ids[-1] == EOS)
        assert not starts or min(starts) == len(text) - 2, "as soon as it is complete"
        assert read == (text[:-2] if starts else text)
        stopped += bool(starts)
    assert stopped
    assert min(len(one.token_ids) for one in completions) >= LEAST
    assert not any(EOS in one.token_ids[:LEAST] for one in completions)


def test_ties_keep_no_more_ids_than_top_k(drawn):
    """A model that gives all ids the same logit; of each place exactly top_k are kept, each with its share."""
    _, model, worker = drawn
    zeros = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    send(worker, zeros.items())
    completions = draw(worker, PROMPTS, Sampling(4, TEMPERATURE, MOST, (2,), (EOS,)))
    batch = make_batch(PROMPTS, completions)
    kept = (replay_support(batch).support[batch.mask] >= 0).sum(-1)
    # top_p 0.9 of twenty alike keeps 18 or 19, by how their sum rounds.
    assert {*kept.tolist()} <= {18, 19}
    want = -kept.float().log()
    assert (batch.rollout_logprobs[batch.mask] - want).abs().max() <= 1e-6


def test_truncation_is_of_samples_alone():
    """Greedy completions are the likeliest ids, and scores of given tokens are of the whole distribution."""
    from engines.vllm.prompts import make_params

    config = replace(CONFIG, min_p=0.01, min_new_tokens=8)

    def make(temperature: float, scores_prompt: bool = False):
        sampling = Sampling(1, temperature, 5, (), (EOS,), scores_prompt=scores_prompt)
        return make_params(sampling, 1, SimpleNamespace(banned_tokens=()), config)

    sampled, greedy, scored = make(TEMPERATURE), make(0.0), make(1.0, scores_prompt=True)
    assert (sampled.top_k, sampled.top_p, sampled.min_p, sampled.logprobs) == (TOP_K, TOP_P, 0.01, TOP_K)
    assert (sampled.min_tokens, sampled.stop, sampled.detokenize) == (5, [*STOPS], True), "no more than there may be"
    assert (greedy.top_k, greedy.logprobs, greedy.stop, greedy.min_tokens) == (0, None, [*STOPS], 5)
    assert (scored.top_k, scored.logprobs, scored.stop, scored.detokenize) == (0, 0, [], False)
