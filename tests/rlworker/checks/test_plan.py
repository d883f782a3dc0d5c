"""What ``rlworker plan`` says, against numbers worked by hand."""

import math
import re
import sys
from dataclasses import replace

import pytest
from support.models import write_config
from support.program import run_program

from engines.config import MegatronConfig, VllmConfig
from engines.megatron.memory.activations import MicroBatch, count_kept
from engines.megatron.memory.estimate import estimate_padding
from engines.models.spec import ModelSpec
from hardware.megatron.kernel_memory import KernelMemory
from rlworker.__main__ import main
from rlworker.checks.plan.recipe import describe_plan, find_nearest, list_misfits, make_plan, plan_recipe
from rlworker.checks.plan.refusals import check_nodes
from rlworker.checks.tiny.models import LARGE_WEIGHTS, make_bare_tokenizer, make_tiny_vlm
from rlworker.config.algorithm import AlgorithmConfig
from rlworker.config.memory import judge_machine
from rlworker.config.run import RunConfig
from rlworker.config.sections import CriticConfig, DataConfig, PlacementConfig

QWEN_7B = {"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944}
QWEN_7B |= {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "rope_theta": 1000000.0}
QWEN_7B |= {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
"""The shape of Qwen2.5-7B, of 7,615,616,512 parameters."""


@pytest.fixture
def folder(tmp_path) -> str:
    return write_config(tmp_path, QWEN_7B)


@pytest.fixture
def models(folder) -> dict[str, ModelSpec]:
    return {"actor": ModelSpec.from_folder(folder)}


def config_of(folder: str, **changes) -> RunConfig:
    config = RunConfig(
        model=folder,
        data=DataConfig(max_prompt_tokens=512),
        actor=MegatronConfig(ranks=8, tp=4, dtype="bfloat16", recompute="full"),
        rollout=VllmConfig(max_new_tokens=1536, dtype="bfloat16", kv_cache_mb=20480),
        algorithm=AlgorithmConfig(mini_batches=2),
        prompts_per_step=64,
        samples_per_prompt=8,
        steps=10,
    )
    return replace(config, **changes)


def test_a_known_model_by_hand(folder, models):
    """bf16: 2 bytes a weight and 4 a gradient on each of 4 tensor-parallel ranks, norms whole on each; 12 bytes a
    weight of optimizer, halved over two replicas; buffers padded by less than a thousandth."""
    plan = make_plan(config_of(folder), models)
    (trainer, rollout) = plan.needs
    norms = (2 * 28 + 1) * 3584
    mine = (7_615_616_512 - norms) / 4 + norms
    memory = trainer.roles["actor"]
    assert memory.parameters == pytest.approx(2 * mine, rel=1e-3) and memory.gradients == 2 * memory.parameters
    assert memory.optimizer == pytest.approx(12 * mine / 2, rel=1e-3) and trainer.count == 8
    engine = rollout.roles["rollout"]
    assert (engine.parameters, engine.activations) == (2 * 7_615_616_512, 20 * 2**30)


def test_a_rollout_engine_of_several_devices_is_cut_over_them(folder, models):
    """Weights by tp, norms whole on each; the cache of keys and values is what each device sets aside."""
    config = config_of(folder, rollout=VllmConfig(engines=2, tp=4, dtype="bfloat16", kv_cache_mb=1024))
    rollout = make_plan(config, models).needs[-1]
    norms, biases = (2 * 28 + 1) * 3584, 28 * (3584 + 2 * 512)
    mine = (7_615_616_512 - norms) / 4 + norms
    assert (rollout.name, rollout.count) == ("rollout devices", 8)
    assert abs(rollout.roles["rollout"].parameters - 2 * mine) <= 2 * biases
    assert rollout.roles["rollout"].activations == 2**30


@pytest.mark.parametrize(("gib", "tokens"), [(4000, 0), (400, 4096), (40, None)])
def test_what_one_machine_holds_is_added_up(folder, models, monkeypatch, gib, tokens):
    """Eight ranks, an engine of two devices, reward workers, driver and Ray; less than Ray leaves a run, 95 %."""
    actor = MegatronConfig(ranks=8, tp=4, dtype="bfloat16")
    config = config_of(folder, actor=actor, rollout=VllmConfig(tp=2, dtype="bfloat16"))
    monkeypatch.setattr("rlworker.config.memory._read_machine_bytes", lambda: gib * 2**30)

    def add_up(config: RunConfig) -> float:
        ranks, engine = make_plan(config, models).needs
        each = ranks.total + 0.45 * ranks.roles["actor"].activations + 0.5 * 2**30
        batch = 2 * 100 * 512 * config.longest
        return 8 * each + 2 * (engine.total + 1.7 * 2**30) + (0.2 + 0.6 + 0.6 + 0.2) * 2**30 + batch

    text, fits = judge_machine(config, models)
    assert f"take up to {add_up(config) / 2**30:.1f} GB of {gib:.1f} GB: actor ranks 8 x " in text
    assert fits == (tokens == 0) == (add_up(config) <= 0.95 * gib * 2**30)
    if tokens:
        fitting = replace(config, actor=replace(actor, micro_batch_tokens=tokens))
        assert f"with --actor.micro-batch-tokens {tokens} it is {add_up(fitting) / 2**30:.1f} GB" in text
        assert add_up(fitting) <= 0.95 * gib * 2**30


@pytest.mark.parametrize("gib", [2, 64])
def test_a_run_that_does_not_fit_its_machine_is_warned_of(make_hf_model, tmp_path, monkeypatch, capsys, gib):
    from rlworker.trainers.launch import check_run

    monkeypatch.setattr("rlworker.config.memory._read_machine_bytes", lambda: gib * 2**30)
    rollout = VllmConfig(max_new_tokens=8, max_model_len=64)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n')
    data = DataConfig(str(rows), max_prompt_tokens=8)
    check_run(RunConfig(make_hf_model("qwen2", True), str(tmp_path / "run"), data, rollout=rollout)).release()
    assert ("memory: all processes on this machine take up to" in capsys.readouterr().out) == (gib == 2)


def test_batches_in_one_vocabulary(folder, models):
    text = describe_plan(make_plan(config_of(folder), models))
    for words in (
        "64 prompts x 8 samples = 512 samples",
        "512 + 1536 = 2048 tokens at most",
        "256 samples, one optimizer step; 2 in a step",
        "tp 4 x pp 1 x cp 1 = 4 ranks; 128 samples of an optimizer step for each of 2",
        "16,384 slots at most, so 16 on a replica where all are longest",
        "10 steps, 20 optimizer steps, 640 prompts, 5,120 samples, 10,485,760 tokens at most",
    ):
        assert words in text


def test_micro_batches_that_stages_and_slots_ask_for(folder, models):
    """Eight samples of 2,048: all in one of 16,384, but one for each of four stages, and two where slots hold four."""
    batch = dict(prompts_per_step=2, samples_per_prompt=8)

    def micro_batches(**settings) -> str:
        actor = MegatronConfig(dtype="bfloat16", recompute="full", **settings)
        return make_plan(config_of(folder, actor=actor, **batch), models).batch["a micro-batch"]

    assert "so 1 on a replica" in micro_batches()
    assert "so 4 on a replica" in micro_batches(ranks=4, pp=4)
    assert "so 2 on a replica" in micro_batches(slots=8192)


def test_engines_that_share_a_process_add_up_but_for_activations(folder):
    models = {"actor": ModelSpec.from_folder(folder), "critic": ModelSpec.from_folder(folder, "value")}
    config = config_of(folder, critic=CriticConfig(train=True))
    shared = make_plan(config, models).needs[0]
    actor, critic = shared.roles["actor"], shared.roles["critic"]
    assert critic.parameters < actor.parameters, "a head of one row in place of the output layer"
    assert shared.total == actor.total + critic.total - min(actor.activations, critic.activations)
    apart = make_plan(replace(config, placement=PlacementConfig(("critic",))), models).needs
    assert [need.name for need in apart] == ["actor ranks", "critic ranks", "rollout engines"]


def test_what_waits_on_the_host_is_not_on_the_device(folder):
    """16 bytes on the host for 12 on the device of each number; a reference comes when the actor does not compute."""
    model, config = ModelSpec.from_folder(folder), config_of(folder, algorithm=AlgorithmConfig(kl_coef=0.1))
    models = {"actor": model, "reference": model}
    plain = make_plan(config, models).needs[0]
    actor = replace(config.actor, optimizer=replace(config.actor.optimizer, offload_fraction=0.5))
    plan = make_plan(replace(config, actor=actor, placement=PlacementConfig(cpu_offload=("reference",))), models)
    hosted, before = plan.needs[0], plain.roles["actor"]
    policy, reference = hosted.roles["actor"], hosted.roles["reference"]
    assert policy.host % 16 == 0 and before.optimizer - policy.optimizer == policy.host // 16 * 12
    assert 0.5 <= (policy.host / 16) / (before.optimizer / 12) < 0.6
    assert reference.host == reference.parameters == plain.roles["reference"].parameters
    visit = max(policy.activations, reference.activations + reference.parameters)
    assert hosted.total == policy.total - policy.activations + visit < plain.total
    assert hosted.host == policy.host + reference.host
    assert "What is on the host is no part of a total" in describe_plan(plan)


def test_devices_that_are_shared_in_turn_hold_both_at_the_canary(folder, models):
    config = config_of(folder)
    actor, rollout = make_plan(config, models).needs
    plan = make_plan(replace(config, placement=PlacementConfig(colocate=True)), models)
    *alone, canary = plan.needs
    assert alone == [actor, rollout] and canary.count == 0
    assert canary.total == actor.roles["actor"].parameters + rollout.total
    assert "share devices in turn" in describe_plan(plan)


def test_what_a_backward_kernel_takes_by_hand():
    """1,000 slots of 2 sequences, 8 heads of 64 that share 2 key heads, in bf16."""
    kernels = KernelMemory(expands_kv=True, query_gradient_bytes=4, slots_per_sequence=128)
    sizes = (1000, 1000, 2, 8, 2, 64, 2)
    assert kernels.count_backward_bytes(*sizes) == 2 * 1000 * 8 * 64 * 2 + (1000 + 256) * 8 * 64 * 4
    assert KernelMemory().count_backward_bytes(*sizes) == 0


def test_what_keys_of_every_query_head_take_by_hand(folder):
    """64 slots: in fp32 a layer keeps keys and values of every query head, and not the keys of a key head."""
    model = ModelSpec.from_folder(folder)
    assert model.heads > model.kv_heads

    def count(dtype: str, expands: bool) -> float:
        kernels = KernelMemory(expands_kv=expands)
        return count_kept(model, MegatronConfig(dtype=dtype), 0, MicroBatch(64, 2), kernels).layers

    more = (2 * model.heads - model.kv_heads) * model.head_dim * model.layers * 64 * 4
    assert count("float32", True) - count("float32", False) == more
    assert count("bfloat16", True) == count("bfloat16", False)


@pytest.mark.parametrize("cp", [1, 2])
def test_what_fused_layers_keep_by_hand(folder, cp):
    """64 slots in bf16: SwiGLU two halves and a product, not five widths; rotation its queries, and under context
    parallelism the projection, which nothing else keeps."""
    model, config = ModelSpec.from_folder(folder), MegatronConfig(ranks=cp, cp=cp, dtype="bfloat16")
    assert not model.qk_norm

    def count(**fused: bool) -> float:
        return count_kept(model, config, 0, MicroBatch(64, 2), KernelMemory(**fused)).layers

    width = model.layers * 64 // cp * 2
    assert count() - count(fuses_swiglu=True) == 2 * model.ffn * width
    projection = (model.heads + 2 * model.kv_heads) * (cp - 1)
    assert count(keeps_unrotated=True) - count() == (model.heads + projection) * model.head_dim * width


def test_what_does_not_fit_is_refused_with_the_nearest_that_does(folder, models):
    config = config_of(folder, actor=MegatronConfig(dtype="bfloat16"))
    assert list_misfits(make_plan(config, models), 80.0)
    words = find_nearest(config, models, 80.0).split()
    pairs = {name.removeprefix("--actor.").replace("-", "_"): value for name, value in zip(words[::2], words[1::2])}
    changes = {name: value if name == "recompute" else int(value) for name, value in pairs.items()}
    fitting = replace(config, actor=replace(config.actor, **changes))
    assert changes and not list_misfits(make_plan(fitting, models), 80.0)
    assert find_nearest(config, models, 1.0) == ""
    shared = replace(config, actor=MegatronConfig(ranks=2), rollout=replace(config.rollout, engines=2))
    shared = replace(shared, placement=PlacementConfig(colocate=True))
    assert find_nearest(shared, models, 1.0) == "", "one rank would not have the engines' devices"


def test_experts_by_hand_and_the_nearest_sizes_that_hold_them(tmp_path):
    """Qwen3-30B-A3B on 16 ranks: an eighth of the experts on each, of which two ranks have the same, all else whole."""
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
    config |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    config |= {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": False}
    models = {"actor": ModelSpec.from_folder(write_config(tmp_path, config))}
    spread = MegatronConfig(ranks=16, ep=8, dtype="bfloat16", recompute="full")
    run = config_of(str(tmp_path), actor=spread, rollout=VllmConfig(tp=4, max_new_tokens=1536, dtype="bfloat16"))
    plan = make_plan(run, models)
    assert plan.batch["experts"] == "16 of 128 on each rank; 8 for each token"
    experts = 48 * 128 * 3 * 2048 * 768
    dense = models["actor"].count_weights() - experts
    memory, rollout = plan.needs[0].roles["actor"], plan.needs[1].roles["rollout"]
    assert memory.parameters == pytest.approx(2 * (experts / 8 + dense), rel=1e-3)
    assert memory.optimizer == pytest.approx(12 * (experts / 8 / 2 + dense / 16), rel=2e-3)
    assert rollout.parameters == pytest.approx(2 * (experts + dense) / 4, rel=2e-3)
    # Eight devices share four heads: each has one of keys and one of values, of 128 rows, where half would be its part.
    shared = make_plan(replace(run, rollout=replace(run.rollout, tp=8)), models).needs[1].roles["rollout"]
    routers, copied = 48 * 128 * 2048, 48 * 2 * 64 * 2048
    assert shared.parameters == pytest.approx(2 * ((experts + dense - routers) / 8 + routers + copied), rel=1e-4)
    shared_out = replace(run.rollout, vllm={"enable_expert_parallel": True})  # as many bytes, of whole experts
    assert make_plan(replace(run, rollout=shared_out), models).needs[1].roles["rollout"] == rollout
    # A token of a layer has a key and a value of 128 numbers of two bytes on a device, and eight choices of a byte.
    replayed = replace(run, rollout=replace(run.rollout, replay_routes=True, kv_cache_mb=1024))
    assert make_plan(replayed, models).needs[1].roles["rollout"].activations == 2**30 * (1 + 8 / 512)
    whole = replace(run, actor=replace(spread, ep=1))
    assert list_misfits(make_plan(whole, models), 80.0) and not list_misfits(plan, 80.0)
    assert find_nearest(whole, models, 80.0) == "--actor.ep 4"


def test_padding_by_hand():
    """Lengths of 1 to 99, 50 on average: thd under tp 2 and cp 2 pads by 3.5 to a multiple of 8; bshd to 104."""
    sizes = dict(ranks=4, tp=2, cp=2)
    assert estimate_padding(MegatronConfig(**sizes), 99) == pytest.approx(3.5 / 53.5)
    assert estimate_padding(MegatronConfig(**sizes, layout="bshd"), 99) == pytest.approx(54 / 104)
    assert estimate_padding(MegatronConfig(), 99) == 0


def test_the_command(folder):
    sizes = ["--actor.ranks", "8", "--actor.tp", "4", "--actor.dtype", "bfloat16", "--rollout.dtype", "bfloat16"]
    plan, recompute = ("plan", "recipes.grpo", "--model", folder, *sizes), ("--actor.recompute", "full")
    done = run_program(main, *plan, *recompute, "--memory-gb", "80")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every process fits into 80 GB" in done.stdout and "32 prompts x 8 samples" in done.stdout
    assert re.search(r"prompts once +[\d,]+ tokens are computed of [\d,]+, [\d.]+ times fewer", done.stdout)
    done = run_program(main, *plan, "--memory-gb", "16")
    assert done.returncode == 1 and "Does not fit into 16 GB: actor ranks need" in done.stdout
    for arguments, message in (
        (["recipes.none"], "there is no module 'recipes.none'"),
        (["recipes.grpo", "--model", "none"], "does not exist"),
        (["recipes.grpo", "--model", folder, "--actor.tp", "3", "--actor.ranks", "3"], "does not divide"),
    ):
        done = run_program(main, "plan", *arguments)
        assert done.returncode == 1 and message in done.stderr


OWN = """from __future__ import annotations
from dataclasses import dataclass
from beside import RANKS
from engines.config import MegatronConfig
from rlworker.config.run import RunConfig

@dataclass(frozen=True)
class Own(RunConfig):
    level: int = 3

DEFAULT = Own(actor=MegatronConfig(ranks=RANKS))
"""


@pytest.fixture
def forgotten(monkeypatch):
    """After the test Python looks for modules where it did before, and no longer knows the one beside a recipe."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("beside", None)


def test_a_recipe_may_be_a_file_outside_the_repository(folder, tmp_path, monkeypatch, forgotten):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text(OWN)  # a name that is taken
    (tmp_path / "beside.py").write_text("RANKS = 2")
    for recipe in (tmp_path / "json.py", "./json.py"):
        sys.modules.pop("beside", None)
        done = run_program(main, "plan", recipe, "--model", folder, "--level", "5", "--memory-gb", "900")
        assert done.returncode == 0, done.stderr
        assert "for each of 2" in done.stdout and "Every process fits into 900 GB" in done.stdout


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "own.py' is no file; give a module such as recipes.grpo or the path of a recipe's file, such as"),
        ("x = 1", "must have its settings as DEFAULT, a RunConfig or SftConfig, but DEFAULT is not there; add a line"),
        ("DEFAULT = {}", "a RunConfig or SftConfig, but DEFAULT is a dict; add a line such as DEFAULT = Run"),
        ("\nraise KeyError('level')", "own.py' failed: KeyError: 'level', at {path}:2; correct it"),
        ("import no_such_thing", "own.py' failed: ModuleNotFoundError: No module named 'no_such_thing', at {path}:1;"),
        ("def broken(:", "own.py' failed: SyntaxError: invalid syntax (own.py, line 1), at {path}:1; correct"),
        ("raise SystemExit(0)", "own.py' failed: SystemExit: 0, at {path}:1; correct it, and keep what starts a"),
    ],
    ids=["missing", "no-default", "other-default", "raises", "import", "syntax", "exits"],
)
def test_what_is_wrong_with_a_recipes_file_is_said_in_a_line(tmp_path, forgotten, source, message):
    path = tmp_path / "own.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ValueError) as error:
        plan_recipe(str(path), [], 0.0)
    said = str(error.value)
    assert said.startswith("plan: ") and message.format(path=path) in said and "\n" not in said


@pytest.mark.parametrize("recipe", ["none", "recipes.none", "json", "", ".grpo", "recipes", "./recipes", "own.txt"])
def test_what_is_no_recipe_is_said_in_a_line(recipe):
    with pytest.raises(ValueError, match=r"^plan: .*such as .*$"):
        plan_recipe(recipe, [], 0.0)


@pytest.mark.parametrize("size", [math.nan, -1.0])
def test_a_memory_that_is_no_size_is_refused(size):
    with pytest.raises(ValueError, match=rf"^plan: --memory-gb is {size:g}, expected the GB of a device; leave it out"):
        plan_recipe("recipes.grpo", [], size)


TINY = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 1024}
TINY |= {"num_attention_heads": 64, "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 512}
TINY |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
TINY |= {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 4096, "tie_word_embeddings": False}
NPU = ["--platform", "npu", "--actor.ranks", "32"]


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (
            TINY,
            [*NPU, "--actor.tp", "32"],
            "actor.tp=32 needs 32 devices of one node, and a node of platform 'npu' has",
        ),
        (TINY, [*NPU, "--rollout.tp", "32"], "rollout.tp=32 needs 32 devices of one node, .*; lower --rollout.tp"),
        (TINY, ["--rollout.max-model-len", "8192"], "max_model_len=8192 is above the model's 4096 positions"),
        (TINY, ["--rollout.top-k", "600"], "top_k=600 is above the 512 tokens"),
        (TINY, ["--rollout.kv-cache-mb", "1"], "kv_cache_mb=1 gives 1 MB to keys and values"),
        (TINY | {"head_dim": 24}, ["--platform", "npu"], "has no attention for the model's head_dim 24"),
        (TINY | {"eos_token_id": 512}, [], "has eos_token_id 512, the model has 512 tokens"),
        (TINY, ["--algorithm.score-centering", "600"], "score_centering=600 is above the 512 tokens"),
    ],
)
def test_a_plan_refuses_what_the_start_refuses(tmp_path, config, settings, message):
    """By config.json alone: nothing else is in the folder."""
    folder = write_config(tmp_path, config)
    with pytest.raises(ValueError, match=message):
        plan_recipe("recipes.grpo", ["--model", folder, *settings], 80.0)


def test_images_both_ways_on_an_npu_are_refused_by_the_plan(tmp_path):
    """Gemma 3's, by its rollout in bshd, and by its trainer in thd."""
    sizes = LARGE_WEIGHTS | {"head_dim": 64}
    folder = make_tiny_vlm(tmp_path, "gemma3", make_bare_tokenizer(), 131, language=sizes)
    settings = [
        "--model",
        folder,
        "--platform",
        "npu",
        "--rollout.max-model-len",
        "131",
        "--data.max-prompt-tokens",
        "8",
    ]
    settings += ["--rollout.max-new-tokens", "8"]
    with pytest.raises(ValueError, match=r"honours the rule .*images.* in thd with cp=1; set --actor.layout bshd"):
        plan_recipe("recipes.grpo", settings, 64.0)
    with pytest.raises(ValueError, match=r"rollout: no backend honours a model with the rules .*images"):
        plan_recipe("recipes.grpo", [*settings, "--actor.layout", "bshd"], 64.0)


@pytest.mark.parametrize(("platform", "gb"), [("npu", 64), ("cuda", 80)])
def test_without_a_size_a_device_is_that_of_the_platforms_node(tmp_path, monkeypatch, platform, gb):
    """And not this host's memory, on which no card's process lies."""
    monkeypatch.setattr("rlworker.config.memory._read_machine_bytes", lambda: 2**20)
    text, fits = plan_recipe("recipes.grpo", ["--model", write_config(tmp_path, TINY), "--platform", platform], 0.0)
    assert fits and f"Every process fits into {gb} GB" in text
    text, fits = plan_recipe("recipes.grpo", ["--model", write_config(tmp_path, TINY)], 0.0)
    assert not fits and "All processes on this machine" in text, "a CPU has no devices"


def test_the_nearest_sizes_stay_within_a_node(tmp_path):
    config = config_of(write_config(tmp_path, QWEN_7B), actor=MegatronConfig(dtype="bfloat16"), platform="cuda")
    models = {"actor": ModelSpec.from_folder(str(tmp_path))}
    assert "--actor.tp 16" not in find_nearest(config, models, 8.0)
    with pytest.raises(ValueError, match=r"actor.tp=16 needs 16 devices of one node"):
        check_nodes(replace(config, actor=MegatronConfig(ranks=16, tp=16, dtype="bfloat16")))
