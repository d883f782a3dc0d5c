"""Forecasts of a step: their FLOPs against the model's, their seconds by hand, and the changes that they name."""

from dataclasses import replace

import pytest
from support.models import write_config

from engines.config import LoraConfig, MegatronConfig, VllmConfig
from engines.models.spec import ModelSpec
from hardware.machines import MACHINES
from hardware.platforms import get_platform
from rlworker.checks.plan.changes import describe_forecast, list_changes
from rlworker.checks.plan.forecast import compute_seconds, forecast_step
from rlworker.checks.plan.work import Work, count_forward, count_optimizer, count_passes, schedule_tokens
from rlworker.config.algorithm import AlgorithmConfig
from rlworker.config.run import RunConfig
from rlworker.config.sections import DataConfig
from scripts.simulate import card

QWEN_05B = {"model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864}
QWEN_05B |= {"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "rope_theta": 1e6}
QWEN_05B |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
MIXTURE = QWEN_05B | {"model_type": "qwen3_moe", "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2}
MIXTURE |= {"moe_intermediate_size": 512, "norm_topk_prob": True}
CUDA, H100 = get_platform("cuda"), MACHINES["h100"]


def make_config(folder: str, rollout: dict | None = None, prompts: int = 8, **actor) -> RunConfig:
    return RunConfig(
        model=folder,
        platform="cuda",
        data=DataConfig(max_prompt_tokens=256),
        actor=MegatronConfig(**{"dtype": "bfloat16"} | actor),
        rollout=VllmConfig(**{"max_new_tokens": 64, "dtype": "bfloat16"} | (rollout or {})),
        prompts_per_step=prompts,
        samples_per_prompt=16,
        steps=1,
    )


@pytest.fixture
def model(tmp_path) -> ModelSpec:
    return ModelSpec.from_folder(write_config(tmp_path, QWEN_05B))


def test_mini_batches_have_their_samples_and_flops_are_all_learners(model):
    def forecast(prompts: int, minis: int, *learners: str):
        config = make_config(model.folder, {"max_new_tokens": 2048, "max_model_len": 4096}, prompts)
        config = replace(config, algorithm=AlgorithmConfig(mini_batches=minis))
        return forecast_step(config, dict.fromkeys(learners or ("actor",), model), H100)

    whole, odd = forecast(64, 32), forecast(63, 32)
    assert odd.phases["update"] == pytest.approx(whole.phases["update"], rel=0.02), "31.5 samples of 32"
    assert forecast(2, 16).phases["update"] < forecast(16, 16).phases["update"] / 1.5, "2 samples of 16"
    assert forecast(64, 32, "actor", "critic").mfu == pytest.approx(whole.mfu, rel=0.05)


def add_ranks(model: ModelSpec, actor: MegatronConfig, tokens) -> float:
    """FLOPs of products on all ranks."""
    stages = (count_passes(model, actor, CUDA, stage, tokens, True).products for stage in range(actor.pp))
    return sum(stages) * actor.ranks / actor.pp


@pytest.mark.parametrize("family", [QWEN_05B, MIXTURE], ids=["dense", "experts"])
def test_products_are_those_that_the_model_counts(tmp_path, family):
    model = ModelSpec.from_folder(write_config(tmp_path, family))
    actor = MegatronConfig(dtype="bfloat16", share="none", micro_batch_tokens=640)  # all logits of one are kept
    tokens = schedule_tokens(model, actor, CUDA, 1, 320, 128, 16)
    expected = model.count_training_flops([1] * 128 * 320)  # no token attends to more than itself
    assert add_ranks(model, actor, tokens) == pytest.approx(expected, rel=1e-3)
    for sizes in ({"ranks": 4, "tp": 2}, {"ranks": 4, "pp": 2}, {"ranks": 8, "tp": 2, "cp": 2, "pp": 2}):
        cut = replace(actor, **sizes)
        spread = schedule_tokens(model, cut, CUDA, 1, 320, 128, 16)
        assert add_ranks(model, cut, spread) == pytest.approx(expected, rel=0.02), sizes
    layers, head = model.count_used_weights()
    again = add_ranks(model, replace(actor, recompute="full"), tokens)
    assert again == pytest.approx(expected + 2 * layers * tokens.slots, rel=1e-3)
    assert expected == pytest.approx(6 * (layers + head) * tokens.slots, rel=1e-3)
    frozen = add_ranks(model, replace(actor, lora=LoraConfig(rank=8, targets=("attention",))), tokens)
    assert frozen == pytest.approx(model.count_training_flops([1] * 128 * 320, frozen=True), rel=1e-3)
    assert frozen == pytest.approx(4 * (layers + head) * tokens.slots, rel=1e-3)


def test_frozen_weights_are_not_gathered_and_adapters_move_inputs_and_outputs(model):
    """By hand: a gather and a sum around attention and MLP, each way, and two gathers for weights that learn."""
    tokens = schedule_tokens(model, MegatronConfig(dtype="bfloat16", share="none"), CUDA, 1, 320, 128, 16)
    learned, frozen = (
        count_passes(model, MegatronConfig(dtype="bfloat16", ranks=2, tp=2, lora=lora), CUDA, 0, tokens, True)
        for lora in (LoraConfig(), LoraConfig(rank=8))
    )
    passes = 24 * tokens.micro_batches
    assert learned.sent["tp"][1] == 10 * passes and frozen.sent["tp"][1] == 8 * passes
    one, two = (
        count_passes(
            model, MegatronConfig(dtype="bfloat16", lora=LoraConfig(rank=rank, targets=names)), CUDA, 0, tokens, True
        )
        for rank, names in ((8, ("o_proj",)), (8, ("o_proj", "down_proj")))
    )
    parameters = 24 * 8 * (896 + 4864) * tokens.micro_batches * (2 * 2 + 2 * 2 + 2 * 4)
    assert two.moved - one.moved == pytest.approx(24 * (6 * 4864 + 4 * 896) * 2 * tokens.slots + parameters, rel=1e-6)


def test_a_prompt_is_computed_and_attended_to_once(model):
    alone, shared = (
        schedule_tokens(model, MegatronConfig(dtype="bfloat16", share=way), CUDA, 256, 64, 128, 16)
        for way in ("none", "prompts")
    )
    assert alone.slots == 128 * 319 and shared.slots == 8 * 256 + 128 * 63
    assert alone.scored == shared.scored == 128 * 64
    assert alone.pairs - shared.pairs == 8 * 15 * 256**2 / 2


def test_seconds_by_hand():
    work = Work(products=989e12 * 0.78, moved=3.35e12 * 0.65, layers=10, sent={"tp": (45e9, 10.0)})
    assert compute_seconds(H100, work, "bfloat16", {"tp": 8}) == pytest.approx(2 + 0.1 + 10 * H100.call)
    assert compute_seconds(H100, work, "bfloat16", {"tp": 16}) == pytest.approx(2 + 0.9 + 10 * H100.call)
    assert compute_seconds(H100, work, "bfloat16", {"tp": 8}, overlaps=True) == pytest.approx(1.1 + 10 * H100.call)
    launches = Work(layers=1000)
    assert compute_seconds(H100, launches, "bfloat16", {}) == 1000 * H100.layer
    cpu = MACHINES["cpu"]
    both = compute_seconds(cpu, launches + Work(moved=cpu.memory * cpu.memory_share), "float32", {})
    assert both == pytest.approx(1 + 1000 * cpu.layer), "a core does its own launching"


def test_updates_beside_those_that_one_h100_took(model):
    """Without the optimizer's step; the share of the memory's rate was taken from the first, which docs/cuda.md has."""
    measured = {(256, "none"): 0.426, (512, "none"): 0.678, (256, "prompts"): 0.207, (512, "prompts"): 0.221}
    for (prompt, share), seconds in measured.items():
        actor = MegatronConfig(dtype="bfloat16", share=share)
        tokens = schedule_tokens(model, actor, CUDA, prompt, 64, 128, 16)
        found = compute_seconds(H100, count_passes(model, actor, CUDA, 0, tokens, True), "bfloat16", {})
        assert found == pytest.approx(seconds, rel=0.2)


ON_A_CARD = {  # seconds of both passes, and forecast / measured
    "0.5B": (0.235, 1.14),
    "0.5B, recomputed": (0.269, 1.15),
    "0.5B, adapters": (0.219, 0.93),
    "3B, recomputed": (1.913, 1.08),
    "7B, adapters": (1.171, 1.02),
    "7B, adapters, recomputed": (3.332, 0.98),
    "30B-A3B, adapters, recomputed": (1.735, 0.72),
}
"""Updates of one H100, which docs/cuda.md has."""


@pytest.mark.parametrize("name", card.CASES)
def test_updates_of_real_sizes_beside_one_h100(tmp_path, name):
    size, (seconds, ratio) = card.CASES[name], ON_A_CARD[name]
    case = card.make_case(size, tmp_path / "model", "cuda")
    assert card.forecast(case, H100) / seconds == pytest.approx(ratio, abs=0.02)


LLAMA_8B = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
LLAMA_8B |= {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128256}
QWEN3_32B = {"num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64}
QWEN3_32B |= {"model_type": "qwen3", "num_key_value_heads": 8, "vocab_size": 151936, "head_dim": 128}
PUBLISHED = [  # ranks, tokens of a sample, sizes of trainers, of an engine, seconds of a step; and ours to those
    (LLAMA_8B, 16, 1060, {"pp": 2}, 1, 97.7, 0.52),
    (LLAMA_8B, 8, 1129, {"pp": 2}, 1, 74.6, 0.85),
    (QWEN3_32B, 32, 3206, {"tp": 4, "pp": 4}, 4, 393, 0.93),
    (QWEN3_32B, 32, 3207, {"tp": 4, "pp": 4}, 4, 215, 1.00),
]
"""Steps of NeMo RL 0.4 on H100 (docs/about/performance-summary.md there): in turns, and with engines beside, by turns.
Its samples have these lengths in the mean."""


@pytest.mark.parametrize("place", range(len(PUBLISHED)))
def test_steps_beside_those_that_were_published(tmp_path, place):
    family, ranks, length, sizes, tp, seconds, ratio = PUBLISHED[place]
    own = {"tie_word_embeddings": False, "max_position_embeddings": 8192}
    folder, is_ahead = write_config(tmp_path, QWEN_05B | family | own), place % 2
    rollout = {"engines": ranks // tp, "tp": tp, "max_new_tokens": length - 150, "staleness": is_ahead}
    config = make_config(
        folder,
        rollout | {"kv_cache_mb": 40 * 1024, "max_model_len": 8192},
        prompts=64,
        ranks=ranks,
        micro_batch_tokens=8192,
        share="none",
        **sizes,
    )
    config = replace(config, data=DataConfig(max_prompt_tokens=150), samples_per_prompt=32)
    config = replace(config, algorithm=AlgorithmConfig(mini_batches=4, kl_coef=0.01))
    found = forecast_step(config, {role: ModelSpec.from_folder(folder) for role in config.roles}, H100)
    assert found.step / seconds == pytest.approx(ratio, abs=0.02)


def test_a_decoded_token_waits_for_all_weights(model):
    one = count_forward(model, 1, 2, 1, 1, 0)
    assert one.moved == 2 * model.count_weights() and one.products == 2 * sum(model.count_used_weights())
    assert count_forward(model, 2, 2, 1, 1, 0).moved == model.count_weights()
    far = count_forward(model, 1, 2, 64, 64, 64 * 1000)
    assert far.moved - one.moved == 64 * 1000 * 2 * 2 * 64 * 2 * 24, "keys and values of two heads in each layer"


def test_experts_are_read_as_far_as_tokens_choose_them(tmp_path):
    model = ModelSpec.from_folder(write_config(tmp_path, MIXTURE))
    layers, head = model.count_used_weights()
    assert count_forward(model, 1, 2, 1, 1, 0).moved == pytest.approx(2 * (layers + head), rel=1e-3)
    assert count_forward(model, 1, 2, 500, 500, 0).moved == pytest.approx(2 * model.count_weights(), rel=1e-3)


def test_replicas_share_the_optimizers_state_and_sum_gradients(model):
    one, two = (count_optimizer(model, MegatronConfig(ranks=ranks, dtype="bfloat16"), 0) for ranks in (1, 2))
    assert one.moved > two.moved and not one.sent
    numbers = model.count_weights()
    assert two.sent["dp"][0] == pytest.approx(numbers * (4 + 2) / 2, rel=1e-3)


def test_a_step_and_what_would_help(model):
    slow = {"share": "none", "recompute": "full", "micro_batch_tokens": 1024}
    config = make_config(model.folder, **slow)
    models = {"actor": model}
    before = forecast_step(config, models, H100)
    assert before.step == pytest.approx(sum(before.phases.values())) and before.level == 1 and 0 < before.mfu < 0.5
    changes = list_changes(config, models, H100)
    assert {"--rollout.staleness 1", "--actor.share prompts", "--actor.recompute none"} <= {
        change.options for change in changes
    }
    for change in changes:
        assert change.forecast == forecast_step(change.config, models, H100) and change.forecast.step < before.step
    ahead = forecast_step(make_config(model.folder, {"staleness": 1}, **slow), models, H100)
    assert ahead.step < before.step and ahead.busy == before.busy
    text = describe_forecast(config, models, "h100")
    assert changes[0].options in text and f"A step on h100: {before.step:.3g} s" in text
    with pytest.raises(ValueError, match="--forecast names 'tpu', expected one of h100, h200, b200, 910b, 910c, cpu"):
        describe_forecast(config, models, "tpu")


def test_changes_that_do_not_fit_are_not_named(model):
    config = make_config(model.folder, recompute="full", micro_batch_tokens=65536, share="none")
    small = replace(H100, memory_gb=60)
    all_fit, few_fit = (
        {change.options for change in list_changes(config, {"actor": model}, machine)} for machine in (H100, small)
    )
    assert "--actor.recompute none" in all_fit - few_fit and "--rollout.staleness 1" in all_fit & few_fit
