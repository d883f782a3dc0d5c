"""Measure how far rollout and trainer are apart in bfloat16, with replayed routes of experts and without.

    python scripts/bench/routes.py [--seeds 3] [--actor NAME VALUE ...] [--tiny] [--json FILE]

A Qwen3-MoE of random weights, with 16 experts of which each token has 4, in 6 layers. A vLLM engine samples from it,
and the actor scores the samples twice: *own*, by the choices of its own routers, and *given*, by those of vLLM's. For
each seed of the weights: the mean and the largest ``|rollout - trainer logprob|``, and the mean of k3.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from timing import make_parser, write_figures

from engines.batch.batch import TrainBatch
from engines.batch.samples import Request, Sampling
from engines.batch.shard import get_logprobs
from engines.config import MegatronConfig, VllmConfig
from engines.models.spec import ModelSpec
from hardware.platforms import DEFAULT_PLATFORM
from rlworker.cluster.ray import running_ray
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.train_group import StartingGroup
from rlworker.cluster.workers import Role
from rlworker.data.rows import Row
from rlworker.rollouts.trajectory import to_batch

PARSER = make_parser(__doc__)
PARSER.add_argument("--seeds", type=int, default=3, help="seeds of the weights, one row each")
PARSER.add_argument("--actor", nargs="*", default=[], metavar="NAME VALUE", help="sizes of the actor, such as tp 2")
OPTIONS = PARSER.parse_args()
PROMPTS, SAMPLES, NEW_TOKENS = (2, 2, 8) if OPTIONS.tiny else (24, 2, 64)
SIZES: dict[str, Any] = {name: int(value) for name, value in zip(OPTIONS.actor[::2], OPTIONS.actor[1::2], strict=True)}
VOCAB, LAYERS = 128, 6


def make_model(folder: Path, seed: int) -> str:
    """Save the model. Its weights are large: a token's scores of the last chosen expert and the next are near."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=VOCAB,
        hidden_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        initializer_range=0.05,
        max_position_embeddings=256,
        eos_token_id=2,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def sample(model: ModelSpec, seed: int) -> TrainBatch:
    """Sample prompts of 3 to 60 tokens."""
    random = np.random.default_rng(seed)
    prompts = [tuple(random.integers(3, VOCAB, random.integers(3, 60)).tolist()) for _ in range(PROMPTS)]
    config = VllmConfig(max_new_tokens=NEW_TOKENS, max_model_len=192, dtype="bfloat16", replay_routes=True)
    with Rollouts(DEFAULT_PLATFORM, 1) as rollouts:
        engine = rollouts.start(model, config).wait()
        sampling = Sampling(SAMPLES, 1.0, NEW_TOKENS, (seed,), ())
        completions = engine.sample([Request(prompt, sampling) for prompt in prompts], (seed,))
    rows = [Row("", prompt, "", {}) for prompt in prompts]
    return to_batch(rows, completions, [0.0] * len(completions))


def measure(folder: Path, seed: int) -> list[dict[str, Any]]:
    """Measure a model: a row for each way."""
    model, rows = ModelSpec.from_folder(make_model(folder, seed)), []
    batch = sample(model, seed)
    role = Role("actor", model, MegatronConfig(dtype="bfloat16", ranks=count_ranks(), **SIZES), trainable=False)
    with StartingGroup("actor", DEFAULT_PLATFORM, (role,), 1) as starting:
        actor = starting.wait()["actor"]
        for way, given in (("own", replace(batch, routes=None)), ("given", batch)):
            apart = (get_logprobs(actor.forward(given)) - batch.require_column("rollout_logprobs"))[batch.mask].double()
            gap, k3 = apart.abs(), float((apart.expm1() - apart).mean())
            figures = {"mean": float(gap.mean()), "largest": float(gap.max()), "k3": k3}
            rows.append({"seed": seed, "routes": way, "tokens": len(apart)} | figures)
            told = " ".join(f"{name} {value:.2e}" for name, value in figures.items())
            print(f"seed {seed}, {way} routes, {len(apart)} tokens: {told}", flush=True)
    return rows


def count_ranks() -> int:
    """Count the ranks of the actor: one replica, or as many as share out the experts."""
    replica = SIZES.get("tp", 1) * SIZES.get("pp", 1) * SIZES.get("cp", 1)
    return max(replica, SIZES.get("ep", 1) * SIZES.get("etp", 1) * SIZES.get("pp", 1))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, running_ray(count_ranks() + 1, DEFAULT_PLATFORM):
        rows = [row for seed in range(OPTIONS.seeds) for row in measure(Path(folder, str(seed)), seed)]
    write_figures(OPTIONS.json, rows)


if __name__ == "__main__":
    main()
