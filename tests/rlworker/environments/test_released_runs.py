"""Runs of two turns with a tool under Mistral's template, by an environment or by OpenAI's client.

A tiny Mistral, its template, vLLM and its parser of Mistral's calls.
"""

import json
from dataclasses import replace

import pytest
import torch
from kill_chain import read_metrics_without_times
from support.environments.released import RELEASED

from engines.config import MegatronConfig, OptimizerConfig, VllmConfig
from rlworker.config.run import RunConfig
from rlworker.config.sections import DataConfig, EnvironmentConfig

pytestmark = [pytest.mark.large, pytest.mark.timeout(900), pytest.mark.usefixtures("cluster")]

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"first": {"type": "integer"}}}},
}
CALL = '[TOOL_CALLS] [{"name": "add", "arguments": {"first": 1}}]'
"""One token of the model's here, which it writes in about two of five turns."""
TURNS = 2


def make_model(folder) -> str:
    """Save a Mistral whose logits of the call and of the end are large in every place.

    All embeddings have one large part in common. It passes through the layers, and the output rows of these two tokens
    have it too.
    """
    from tokenizers import AddedToken
    from transformers import GenerationConfig, MistralConfig, MistralForCausalLM

    from recipes.common.addition import make_tokenizer

    released = RELEASED["Mistral v0.3"]
    tokenizer = make_tokenizer(released.template)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*released.special, CALL)])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=32)
    tokens = dict(vocab_size=128, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    config = MistralConfig(
        num_key_value_heads=2,
        max_position_embeddings=1024,
        sliding_window=None,
        tie_word_embeddings=False,
        **sizes,
        **tokens,
    )
    model = MistralForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight += 1.0
        rows = [tokenizer.convert_tokens_to_ids(CALL), tokenizer.eos_token_id]
        model.lm_head.weight[rows] += 6.0 / 64
    model.save_pretrained(folder)
    GenerationConfig(eos_token_id=2).save_pretrained(folder)
    return str(folder)


def add(first: int) -> str:
    return str(first + 3)


async def play(policy, row):
    """Answer the model's calls in process; each answered call is worth 1."""
    from rlworker import Episode, answer_calls

    episode = Episode(row, tool_parser="mistral")
    for _ in range(TURNS):
        sample = await policy.sample(episode)
        answers = await answer_calls(policy, sample, {"add": add_here})
        if not answers:
            break
        episode.reward(float(bool(sample.calls)))
        episode.observe(answers)
    return episode


async def add_here(first: int) -> str:
    return add(first)


async def play_by_calls(policy, row):
    """Play the same by OpenAI's client, which knows nothing of training."""
    from recipes.common.agents import connect

    endpoint = policy.endpoint(row, tool_parser="mistral")
    client, messages = connect(endpoint), [*row.messages]
    for _ in range(TURNS):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        said = reply.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        # What the endpoint hands on of a call that cannot be read is its text.
        is_call = said.tool_calls or CALL[:12] in (said.content or "")
        if not is_call:
            break
        endpoint.episode.reward(float(bool(said.tool_calls)))
        for call in said.tool_calls or ():
            result = add(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not said.tool_calls:
            messages.append({"role": "tool", "content": "error: the call cannot be read"})
    return endpoint.episode


@pytest.fixture(scope="module")
def config(tmp_path_factory, by_value):
    folder = tmp_path_factory.mktemp("mistral")
    rows = [{"prompt": [{"role": "user", "content": f"1+{n}?"}], "answer": "", "tools": [TOOL]} for n in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunConfig(
        model=make_model(folder / "model"),
        data=DataConfig(str(folder / "rows.jsonl"), max_prompt_tokens=400),
        actor=MegatronConfig(ranks=1, optimizer=OptimizerConfig(lr=1e-3)),
        rollout=VllmConfig(max_new_tokens=3, max_model_len=1024, max_num_seqs=64, kv_cache_mb=64),
        environment=EnvironmentConfig(turns=TURNS, tokens=1000, workers=1, time_limit_s=60.0),
        steps=2,
        prompts_per_step=4,
        samples_per_prompt=8,
    )


def run(config: RunConfig, folder, environment) -> tuple[list[dict], list[dict]]:
    """Run to the end: the metrics of every step, and the samples that the run folder has."""
    from rlworker.tracking.log import name_samples
    from rlworker.trainers.rl import Trainer

    with Trainer(replace(config, run_dir=str(folder)), environment) as trainer:
        trainer.fit()
    files = [name_samples(folder, step) for step in (1, 2)]
    samples = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [line for line in read_metrics_without_times(folder) if "turns" in line], samples


def test_two_turns_with_a_tool_are_sampled_and_learned_alike_in_process_and_by_calls(config, tmp_path):
    lines, samples = run(config, tmp_path / "in_process", play)
    assert len(lines) == 2
    for line in lines:
        assert line["episode_failures"] == line["forks"] == 0 and line["samples"] == 32
        assert 1.2 < line["turns"] < 2 and 0.2 < line["reward"] < 2 and line["grad_norm"] > 0
    texts = ["".join(turn["text"] for turn in sample["turns"]) for sample in samples]
    called = [text for text in texts if '"call_id": "call00000"}[/TOOL_RESULTS]' in text]
    assert called and all(text.count("[AVAILABLE_TOOLS]") == 1 for text in texts)
    assert any('[TOOL_RESULTS] {"content": 4, ' in text for text in called)
    assert run(config, tmp_path / "by_calls", play_by_calls)[0] == lines
