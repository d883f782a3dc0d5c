import ast
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from support.models import write_config
from support.ranks.engines_cases import start_process

from engines.config import MegatronConfig, OptimizerConfig, VllmConfig
from engines.models.spec import ModelSpec
from engines.pass_through import (
    MEGATRON_OWN,
    MEGATRON_REFUSED,
    MEGATRON_SOURCES,
    VLLM_OWN,
    VLLM_REFUSED,
    read_installed_fields,
)
from hardware.attention import capabilities
from hardware.attention.capabilities import TABLE, list_override_warnings
from hardware.platform import make_ray_options
from hardware.platforms import PLATFORMS, get_platform
from rlworker.config.algorithm import AlgorithmConfig
from rlworker.config.model_checks import check_engines, check_rollout
from rlworker.config.run import RunConfig
from rlworker.config.sections import CriticConfig, CurriculumConfig, DataConfig, LimitsConfig, PlacementConfig
from rlworker.config.sft import SftConfig
from rlworker.data.rows import load_tokenizer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(steps=0), "steps must be at least 1"),
        (
            dict(actor=MegatronConfig(ranks=8), prompts_per_step=2, samples_per_prompt=2),
            "4 samples cannot feed mini_batches=1 on 8 data-parallel ranks",
        ),
        (dict(rollout=VllmConfig(engines=3), prompts_per_step=2), "leaves some of 3 rollout engines without work"),
        (dict(data=DataConfig(max_prompt_tokens=2000)), "max_prompt_tokens \\+ max_new_tokens = 2256 exceeds"),
    ],
)
def test_contradictions_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(sources={"a": 0.0}), r"sources has \{'a': 0.0\}, expected .* weights above 0"),
        (dict(sources={"a": float("inf")}), "sources has .*expected the paths of rows and weights above 0"),
        (dict(sources={"": 1.0}), "sources has .*expected the paths of rows"),
        (dict(sources={"a": "1"}), "sources must be names with values, got"),
        (dict(buckets={1: -1.0}), r"buckets has the weights \[-1.0\]"),
        (dict(buckets={0.5: 0.0, 1: 0.0}), "expected finite numbers of 0 or more and one above 0"),
        (dict(buckets={0.5: 1.0, 0.7: 1.0}), r"must have rising bounds, .*: 1 without a difficulty_field"),
        (dict(buckets={1: 1.0, 0.5: 1.0}), "must have rising bounds"),
        (dict(difficulty_field="level"), "difficulty_field='level' does nothing without buckets"),
        (dict(advance_at=0.5, buckets={1: 1.0}), "opens buckets one after another, which needs rows with a difficulty"),
        (dict(advance_at=0.5, buckets={1: 0.0, 2: 1.0}, difficulty_field="level"), "the first bucket has weight 0"),
        (dict(pass_rates=(0.9, 0.1)), r"pass_rates=\(0.9, 0.1\) must be a lowest and a highest rate from 0 to 1"),
        (dict(pass_rates=(0.1,)), "must be a lowest and a highest rate"),
        (dict(pass_rates=(0.0, 2.0)), "must be a lowest and a highest rate"),
    ],
)
def test_a_curriculum_that_chooses_nothing_is_refused(settings, message):
    with pytest.raises(ValueError, match=f"^curriculum: .*{message}"):
        CurriculumConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(placement=PlacementConfig(colocate=True)), r"staleness=1 samples while trainers compute, .*take turns"),
        (dict(algorithm=AlgorithmConfig(greedy_baseline=True)), r"staleness=1 learns from samples of older weights"),
    ],
)
def test_what_cannot_run_ahead_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(rollout=VllmConfig(staleness=1), **settings)
    RunConfig(**settings)
    for staleness in (-1, 9):
        with pytest.raises(ValueError, match=r"rollout: staleness must be from 0 to 8"):
            VllmConfig(staleness=staleness)


def test_importance_is_truncated_where_an_engine_is_bf16_or_rollouts_run_ahead():
    bf16 = {"actor": MegatronConfig(dtype="bfloat16")}, {"rollout": VllmConfig(dtype="bfloat16")}
    ahead = {"rollout": VllmConfig(staleness=1)}
    for settings, want in (({}, "none"), (bf16[0], "truncated"), (bf16[1], "truncated"), (ahead, "truncated")):
        assert RunConfig(**settings).importance == want
    for importance in ("truncated", "masked", "none"):
        algorithm = AlgorithmConfig(importance=importance)
        assert {RunConfig(algorithm=algorithm, **s).importance for s in ({}, ahead, *bf16)} == {importance}


@pytest.mark.parametrize(
    "section", [{"actor": MegatronConfig(dtype="bfloat16")}, {"rollout": VllmConfig(dtype="bfloat16")}]
)
def test_the_limit_in_bfloat16_is_five_times_the_floor(section):
    """Up to a half; and the one that the user sets wins, for which nothing is measured."""
    config = RunConfig(**section)
    assert config.takes_floor and config.find_logprob_limits(0.03) == (pytest.approx(0.15), INF)
    assert config.find_logprob_limits(0.2) == config.find_logprob_limits(None) == (0.5, INF)
    config = RunConfig(**section, limits=LimitsConfig(logprob_diff_mean=1e-3))
    assert not config.takes_floor and config.find_logprob_limits(0.2) == (1e-3, INF)


def test_the_limit_in_float32_grows_with_rounding():
    """Twice the actor's own rounding, at least 2e-5; the limit on the largest difference is fixed."""
    config = RunConfig()
    assert config.takes_floor and config.is_fp32
    assert config.find_logprob_limits(None) == config.find_logprob_limits(0.9e-5) == (2e-5, 5e-3)
    assert config.find_logprob_limits(1.5e-5) == (pytest.approx(3e-5), 5e-3)
    config = RunConfig(limits=LimitsConfig(logprob_diff_mean=1e-3))
    assert not config.takes_floor and config.find_logprob_limits(1.0) == (1e-3, 5e-3)


def test_a_separate_reference_takes_as_many_workers_as_the_policy():
    config = RunConfig(actor=MegatronConfig(ranks=2), algorithm=AlgorithmConfig(kl_coef=0.1))
    assert config.num_workers == 3 and RunConfig().num_workers == 2
    assert dataclasses.replace(config, placement=PlacementConfig(("reference",))).num_workers == 5


def test_engines_that_take_turns_with_the_trainers_need_no_devices():
    shared = PlacementConfig(("reference",), colocate=True)
    config = RunConfig(
        actor=MegatronConfig(ranks=4), rollout=VllmConfig(engines=2, tp=2), algorithm=AlgorithmConfig(kl_coef=0.1)
    )
    assert (config.num_workers, dataclasses.replace(config, placement=shared).num_workers) == (8, 8)
    groups = dataclasses.replace(config, placement=shared).worker_groups
    assert [name for name, *_ in groups] == ["actor", "reference"], "what is separate has its own"
    with pytest.raises(ValueError, match=r"rollout.engines=2 x tp=2 = 4 devices onto those of actor.ranks=2; lower"):
        dataclasses.replace(config, actor=MegatronConfig(ranks=2), placement=shared)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(critic=CriticConfig(train=True, warmup_steps=100)), "leaves the actor none of steps=100"),
        (
            dict(
                critic=CriticConfig(train=True),
                algorithm=AlgorithmConfig(surrogate="gspo", aggregation="sequence_mean"),
            ),
            "surrogate='gspo' has one ratio for a whole sequence",
        ),
        (dict(algorithm=AlgorithmConfig(dynamic_sampling=1), samples_per_prompt=1), "needs samples that can differ"),
        (dict(placement=PlacementConfig(("critic",))), "which this run does not have"),
        (dict(placement=PlacementConfig(cpu_offload=("reference",))), r"placement.cpu_offload names \['reference'\]"),
    ],
)
def test_settings_that_do_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**settings)
    with pytest.raises(ValueError, match="needs a weight of the KL penalty"):
        AlgorithmConfig(kl_in="reward")


WRONG_STEPS = ["3:2", "0:2", "1:8", "2", "2:", "a:b", "1:2:3", "-1:2", "1.0:2", " 1:2", "1:2\n", "٣:٤"]


@pytest.mark.parametrize("text", WRONG_STEPS)
def test_steps_to_profile_that_a_run_does_not_have_are_refused(text):
    for config in (RunConfig, SftConfig):
        with pytest.raises(ValueError, match=r"^config: profile_steps=.* must name a first and a last step A:B, from"):
            config(steps=7, profile_steps=text)


def test_steps_to_profile_are_those_from_the_first_to_the_last():
    assert [*RunConfig(steps=7, profile_steps="2:4").profiled_steps] == [2, 3, 4]
    assert [*SftConfig(steps=7, profile_steps="7:7").profiled_steps] == [7]
    assert [*RunConfig().profiled_steps] == []


def test_another_model_is_checked_by_its_own_name(make_hf_model, tmp_path):
    model = make_hf_model("qwen2", True)
    folder = shutil.copytree(model, tmp_path / "small")
    config = RunConfig(
        model=model,
        data=DataConfig(max_prompt_tokens=8),
        rollout=VllmConfig(max_new_tokens=4, max_model_len=16),
    )
    for changes, message in (
        ({"vocab_size": 98}, r"reference \(--algorithm.reference\): "),
        ({"max_position_embeddings": 11}, "has 11 positions, expected at least 12"),
    ):
        write_config(folder, model, **changes)
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config, algorithm=AlgorithmConfig(reference=str(folder))).check_models()
    with pytest.raises(ValueError, match=r"critic \(--critic.model\): model: folder 'none' does not exist"):
        dataclasses.replace(config, critic=CriticConfig(train=True, model="none")).check_models()


def test_scores_are_centered_by_no_more_tokens_than_there_are(make_hf_model):
    data, rollout = DataConfig(max_prompt_tokens=8), VllmConfig(max_new_tokens=4, max_model_len=16)
    config = RunConfig(model=make_hf_model("qwen2", True), data=data, rollout=rollout)
    vocab = config.check_models()["actor"].vocab
    dataclasses.replace(config, algorithm=AlgorithmConfig(score_centering=vocab)).check_models()
    message = f"score_centering={vocab + 1} is above the {vocab} tokens of the model's vocabulary"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, algorithm=AlgorithmConfig(score_centering=vocab + 1)).check_models()


def test_a_model_that_devices_cannot_share_is_refused(make_hf_model):
    rollout = VllmConfig(max_new_tokens=4, max_model_len=16, tp=3)
    with pytest.raises(ValueError, match=r"^rollout: tp=3 does not divide the model's 4 attention heads; lower --roll"):
        rollout.check_model(ModelSpec.from_folder(make_hf_model("qwen2", True)))


def test_experts_are_shared_out_over_the_devices_of_an_engine(make_hf_model):
    """And then need no width that the devices could cut."""
    settings = dict(max_new_tokens=4, max_model_len=16, vllm={"enable_expert_parallel": True})
    model = ModelSpec.from_folder(make_hf_model("qwen3_moe", False))
    VllmConfig(tp=2, **settings).check_model(model)
    narrow = dataclasses.replace(model.kinds[0].options.experts, ffn=31)
    kinds = tuple(dataclasses.replace(k, options=dataclasses.replace(k.options, experts=narrow)) for k in model.kinds)
    odd = dataclasses.replace(model, kinds=kinds)
    VllmConfig(tp=2, **settings).check_cut(odd)
    with pytest.raises(ValueError, match="tp=2 does not divide the model's 31 experts' ffn size"):
        VllmConfig(tp=2, max_new_tokens=4, max_model_len=16).check_cut(odd)
    with pytest.raises(ValueError, match=r"^rollout: --rollout.vllm enable_expert_parallel .* rollout.tp=1; raise"):
        VllmConfig(**settings)
    with pytest.raises(ValueError, match="enable_expert_parallel shares out experts, and the model has none"):
        VllmConfig(tp=2, **settings).check_model(ModelSpec.from_folder(make_hf_model("qwen2", True)))
    with pytest.raises(ValueError, match="experts would move between devices"):
        VllmConfig(tp=2, vllm={"enable_eplb": True})


def test_an_engine_takes_as_much_of_ray_as_its_devices():
    assert make_ray_options(get_platform("npu"), 4) == {"num_cpus": 4, "resources": {"NPU": 4}}
    assert RunConfig(rollout=VllmConfig(engines=2, tp=2), actor=MegatronConfig(ranks=3)).num_workers == 7


def test_a_head_size_without_a_rollout_kernel_is_refused(make_hf_model):
    rollout = VllmConfig(max_new_tokens=8, max_model_len=64)
    config = RunConfig(model=make_hf_model("qwen3", False), data=DataConfig(max_prompt_tokens=8), rollout=rollout)
    with pytest.raises(ValueError, match=r"has no attention for the model's head_dim 48, expected one of \[32, 64"):
        config.check_models()


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError, match="cannot be read"):
        load_tokenizer(str(tmp_path))


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("section", "name", "value", "message"),
    [
        (AlgorithmConfig, "mini_batches", 0, "algorithm: mini_batches must be at least 1, got 0; change --algorithm"),
        (AlgorithmConfig, "kl_coef", -0.1, "algorithm: kl_coef must be finite and not negative, got -0.1"),
        (AlgorithmConfig, "clip_low", NAN, "algorithm: clip_low must be a number or null, got nan"),
        (RunConfig, "seed", -1, "config: seed must be from 0 to 4294967295, got -1"),
        (RunConfig, "seed", 2**32, "config: seed must be from 0 to 4294967295, got 4294967296"),
        (RunConfig, "steps", "5", "config: steps must be a whole number, got '5'; change --steps"),
        (RunConfig, "actor", None, "config: actor must be MegatronConfig, got None"),
        (RunConfig, "trackers", ("paper",), r"config: trackers must be a list \(one of 'tensorboard', 'wandb', .*got"),
        (OptimizerConfig, "lr", 10**400, "actor.optimizer: lr must be finite and not negative, got 1000"),
        (OptimizerConfig, "min_lr", 1e-4, "actor.optimizer: min_lr must be at most lr=1e-06, got 0.0001; lower --act"),
        (OptimizerConfig, "adam_beta1", 1.0, "actor.optimizer: adam_beta1 must be at least 0 and below 1, got 1.0"),
        (OptimizerConfig, "adam_eps", 0.0, "actor.optimizer: adam_eps must be above 0 and finite, got 0.0"),
        (MegatronConfig, "timeout_s", 0, "actor: timeout_s must be from 1 to 1000000000, got 0"),
        (MegatronConfig, "dtype", "float16", "actor: dtype must be one of 'float32', 'bfloat16', got 'float16'"),
        (VllmConfig, "temperature", 0.009, "rollout: temperature must be from 0.01 to 2.*, got 0.009"),
        (VllmConfig, "max_num_seqs", 4097, "rollout: max_num_seqs=4097 is above vLLM's max_num_batched_tokens=4096"),
    ],
)
def test_impossible_values_are_refused(section, name, value, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        section(**{name: value})


def test_possible_values_are_taken():
    limits, algorithm = LimitsConfig(logprob_diff_max=INF), AlgorithmConfig(clip_high=INF)
    config = RunConfig(limits=limits, seed=2**32 - 1, algorithm=algorithm)
    assert config.find_logprob_limits(None) == (2e-5, INF)
    assert OptimizerConfig(lr=0, adam_beta1=0, clip_grad=0).lr == 0
    assert VllmConfig(temperature=0.01, max_num_seqs=9000, vllm={"max_num_batched_tokens": 9000}).max_num_seqs == 9000


def test_a_warm_up_must_end_before_the_decay_does():
    with pytest.raises(ValueError, match="lr_decay_steps=5 must be above lr_warmup_steps=5; raise --actor"):
        OptimizerConfig(lr_warmup_steps=5, lr_decay_steps=5)


PASSED_THROUGH = [
    (lambda given: VllmConfig(vllm=given), "rollout: --rollout.vllm", VLLM_OWN, VLLM_REFUSED),
    (lambda given: MegatronConfig(megatron=given), "actor: --actor.megatron", MEGATRON_OWN, MEGATRON_REFUSED),
]


@pytest.mark.parametrize(("make", "where", "own", "refused"), PASSED_THROUGH, ids=["vllm", "megatron"])
def test_what_an_engine_sets_or_cannot_follow_is_not_passed_through(make, where, own, refused):
    for name in own:
        with pytest.raises(ValueError, match=rf"{where} may not set \['{name}'\], which the engine sets itself"):
            make({name: 1})
    for name in refused:
        with pytest.raises(ValueError, match=rf"{where} may not set \['{name}'\]: .*; leave them out"):
            make({name: 1})


def test_other_names_are_those_of_the_installed_packages():
    assert VllmConfig(vllm={"enforce_eager": False, "block_size": 64}).vllm["block_size"] == 64
    assert MegatronConfig(megatron={"barrier_with_L1_time": False, "cp_comm_type": "p2p"}).megatron
    with pytest.raises(ValueError, match=r"vllm has 'blok_size', which the installed .*; did you mean 'block_size'"):
        VllmConfig(vllm={"blok_size": 64})
    with pytest.raises(ValueError, match="'repetition_penalty', a sampling parameter that the trainer cannot follow"):
        VllmConfig(vllm={"repetition_penalty": 1.1})
    with pytest.raises(ValueError, match=r"may not set \['enable_lora'\]: it takes another model than the folder's"):
        VllmConfig(vllm={"enable_lora": True})
    with pytest.raises(ValueError, match="vllm has block_size 'large', expected a whole number or null"):
        VllmConfig(vllm={"block_size": "large"})
    with pytest.raises(ValueError, match="pipeline_parallel_size: on a CPU vLLM starts with it and fails"):
        VllmConfig(vllm={"pipeline_parallel_size": 2})
    with pytest.raises(ValueError, match=r"megatron has 'sequnce_paralel', which the installed .*; did you mean"):
        MegatronConfig(megatron={"sequnce_paralel": True})
    with pytest.raises(ValueError, match="megatron has kitchen_attention_backend 'xla', expected one of 'sdpa'"):
        MegatronConfig(megatron={"kitchen_attention_backend": "xla"})


def test_the_names_are_what_vllm_and_megatron_call_them(one_rank):
    """A name that the installed dataclasses lack would be refused for a wrong reason."""

    def names_of_megatron(rank, world):
        start_process(rank)
        from megatron.core.transformer import TransformerConfig

        return [field.name for field in dataclasses.fields(TransformerConfig)]

    fields, names = read_installed_fields("megatron", *MEGATRON_SOURCES), one_rank.run(names_of_megatron)[0]
    assert fields.keys() == {name for name in names if not name.startswith("_")}
    assert fields["num_layers"] is int and fields["num_query_groups"] == int | None
    assert fields.keys() >= MEGATRON_OWN | MEGATRON_REFUSED
    of_experts = {name for name in fields if name.startswith("moe_")}
    assert of_experts - MEGATRON_OWN - MEGATRON_REFUSED == {"moe_aux_loss_coeff", "moe_z_loss_coeff"}
    vllm = read_installed_fields("vllm", ("engine/arg_utils.py", "EngineArgs"))
    assert vllm.keys() >= VLLM_OWN | VLLM_REFUSED and vllm["block_size"] == int | None
    assert read_installed_fields("nowhere", ("engine/arg_utils.py", "EngineArgs")) is None
    assert read_installed_fields("vllm", ("engine/arg_utils.py", "NoSuchClass")) is None


@pytest.mark.parametrize(
    ("file", "own"), [("vllm/engine.py", VLLM_OWN), ("megatron/model.py", MEGATRON_OWN)], ids=["vllm", "megatron"]
)
def test_the_engines_set_nothing_that_is_passed_through_too(file, own):
    """What stands in the engines' own ``settings`` is what may not come from outside."""
    tree = ast.parse((Path(__file__).parents[3] / "engines" / file).read_text())
    names = {
        keyword.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and getattr(node.targets[0] if isinstance(node, ast.Assign) else node.target, "id", "") == "settings"
        for keyword in node.value.keywords
    }
    assert len(names) > 5 and names <= own


def test_what_a_platform_sets_of_vllm_a_user_may_set():
    settings = {name: get_platform(name).rollout_settings for name in PLATFORMS}
    known = read_installed_fields("vllm", ("engine/arg_utils.py", "EngineArgs"))
    assert all(known.keys() - VLLM_OWN - VLLM_REFUSED >= given.keys() for given in settings.values())
    eager = {name for name, given in settings.items() if given.get("enforce_eager")}
    assert eager == PLATFORMS.keys() - {"cuda"}, "vLLM takes graphs unless told otherwise"


@pytest.mark.parametrize(("space", "have"), [("1", 1024), ("", 1024), ("3", 3072)])
def test_the_longest_sequence_must_fit_the_memory_for_keys_and_values(
    make_hf_model, tmp_path, monkeypatch, space, have
):
    """4 layers, 2 key-value heads of 32 in fp32 take 2 KiB a token, and vLLM needs one block of 32 tokens more."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    folder = make_hf_model("qwen2", False)
    longest = have * 2**20 // 2048 - 32
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = RunConfig(
        model=write_config(tmp_path, folder, max_position_embeddings=10**7), rollout=VllmConfig(max_model_len=longest)
    )
    config.check_models()
    too_long = dataclasses.replace(config, rollout=VllmConfig(max_model_len=longest + 1))
    with pytest.raises(ValueError, match=f"kv_cache_mb=0 gives {have} MB .*, expected at least {have + 1} for one"):
        too_long.check_models()
    dataclasses.replace(config, rollout=VllmConfig(max_model_len=longest + 1, kv_cache_mb=have + 1)).check_models()


def test_states_take_room_beside_keys_and_values(make_hf_model, tmp_path):
    """A layer's block of 32 tokens of 2 key-value heads of 32 takes 16 KiB, and has room for a state: 4 heads of 16
    x 32 numbers, and 3 inputs of 192 columns. Of 64 blocks in 1 MB vLLM keeps one and three layers two each, which
    leaves 57 to the layer with attention. In bfloat16 a state takes two blocks of tokens, which are half as large."""
    saved = json.loads(Path(make_hf_model("qwen3_5_text", False), "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(saved | {"max_position_embeddings": 10**4}))
    spec = ModelSpec.from_folder(tmp_path)
    for dtype in ("float32", "bfloat16"):
        tokens = 57 * (32 if dtype == "float32" else 64)
        check_rollout(spec, "cpu", VllmConfig(max_model_len=tokens, kv_cache_mb=1, dtype=dtype))
        with pytest.raises(ValueError, match="kv_cache_mb=1 gives 1 MB to keys and values, expected at least 2 "):
            check_rollout(spec, "cpu", VllmConfig(max_model_len=tokens + 1, kv_cache_mb=1, dtype=dtype))


def test_the_memory_that_the_environment_gives_must_be_a_number(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "much")
    with pytest.raises(ValueError, match="VLLM_CPU_KVCACHE_SPACE must be a whole number of GiB, got 'much'"):
        get_platform("cpu").get_rollout_env()


def test_slots_must_be_cut_over_the_ranks():
    with pytest.raises(ValueError, match="slots=100 must be a multiple of 48, which tp=2, cp=4 and pad_to_mult"):
        MegatronConfig(ranks=8, tp=2, cp=4, pad_to_multiple_of=3, slots=100)
    assert MegatronConfig(ranks=8, tp=2, cp=4, pad_to_multiple_of=3, slots=144).slots == 144


def test_an_override_names_a_refused_cell_of_the_capability_table(make_hf_model):
    with pytest.raises(ValueError, match="'window' names no cell of the capability table; a name is like 'torch_sdpa/"):
        MegatronConfig(attention_override=("window",))
    folder = make_hf_model("llama", False)
    actor = MegatronConfig(attention_override=("npu_mode3/thd/cp/window",))
    with pytest.raises(
        ValueError, match=r"a backend that platform 'cpu' does not use, expected one of \['torch_sdpa', 'torch_delta'\]"
    ):
        check_engines(folder, "cpu", actor, VllmConfig(max_new_tokens=4, max_model_len=16))
    (warning,) = list_override_warnings(("npu_mode3/thd/cp/window",))
    assert warning.startswith("attention: npu_mode3/thd/cp/window is refused by the capability table (not shown")


def test_a_rule_that_the_platform_does_not_honour_is_refused_before_anything_starts(
    make_hf_model, tmp_path, monkeypatch
):
    """A model with windows, on a platform whose table refuses them; the named override lets it pass."""
    folder = shutil.copytree(make_hf_model("qwen2-window", False), tmp_path / "model")
    write_config(folder, folder, max_window_layers=0, layer_types=["sliding_attention"] * 4)
    place = ("torch_sdpa", "thd", False, "window")
    refused = dataclasses.replace(TABLE[place], honoured=False, text="for the test", nearest="bshd")
    monkeypatch.setitem(capabilities.TABLE, place, refused)
    rollout = VllmConfig(max_new_tokens=4, max_model_len=16)
    config = RunConfig(model=str(folder), data=DataConfig(max_prompt_tokens=8), rollout=rollout)
    with pytest.raises(
        ValueError, match=r"rule window\(4\) in thd with cp=1; set .* torch_sdpa/thd/no-cp/window is refu"
    ):
        config.check_models()
    override = MegatronConfig(attention_override=("torch_sdpa/thd/no-cp/window",))
    assert dataclasses.replace(config, actor=override).check_models()["actor"].rules[0].window == 4
