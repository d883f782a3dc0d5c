"""Weights in and out, learning-rate schedule, checkpoints: the parts of the engine that parity does not reach."""

import math
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cover import in_runs
from support.factors import IMAGE_EXPERT_FAMILIES, IMAGE_STATE_FAMILIES, parse_size
from support.huggingface import compute_logprobs, load_folder
from support.models import make_vlm
from support.ranks.engines_cases import build_engine, compute_weights, leave_groups, make_batch, plan, start_process
from support.ranks.pool import draw_address
from support.rounding import check_distances, measure_rounding

from engines.config import OptimizerConfig
from engines.models.families.text.qwen3_5_text import DeltaMixer
from engines.models.spec import ModelSpec
from hardware.megatron.states.mixer import DeltaNet
from rlworker.checks.reference.huggingface import probe_loss

COSINE = OptimizerConfig(lr=1e-3, adam_eps=1e-5, lr_warmup_steps=4, lr_scheduler="cosine", lr_decay_steps=8)
SETTINGS = {"optimizer": COSINE}
SEEING = IMAGE_EXPERT_FAMILIES + IMAGE_STATE_FAMILIES


def steps(engine, count, seed=1):
    batch = make_batch(seed)
    _, shard = plan(engine, batch)
    return [engine.train_step(shard, probe_loss, float(batch.mask.sum())) for _ in range(count)]


def export(engine):
    return {name: tensor.clone() for name, tensor in engine.export_weights()}


@pytest.mark.parametrize(
    ("family", "settings", "tied"),
    [
        ("qwen2", {"tp": 2}, True),
        ("qwen2", {"pp": 2}, False),
        ("qwen2-one-head", {"tp": 2}, False),  # which the ranks share
        ("phi3", {"tp": 2}, False),  # whose projections are fused
        ("qwen3_moe", {"tp": 2, "ep": 2}, False),
        ("qwen2_moe", {"tp": 2, "etp": 2}, False),  # with a shared expert
        ("qwen3_5_text", {"tp": 2}, False),  # with states, and gates beside queries
        ("qwen3_next", {"tp": 2, "ep": 2}, False),  # whose projections of states are fused by key heads
        pytest.param("qwen3_5_moe_text", {"tp": 2, "ep": 2}, False, marks=pytest.mark.large),
        ("qwen3_vl_moe", {"ep": 2}, False),  # whose experts are fused and transposed
        pytest.param("qwen3_vl_moe", {"tp": 2, "etp": 2}, False, marks=pytest.mark.large),
        pytest.param("qwen3_5_moe", {"tp": 2, "ep": 2}, False, marks=pytest.mark.large),  # whose experts are fused
        pytest.param("qwen3_5_moe", {"tp": 2, "etp": 2}, False, marks=pytest.mark.product),
        pytest.param("mixtral", {"ep": 2}, False, marks=pytest.mark.large),
        pytest.param("glm4_moe", {"tp": 2, "ep": 2}, False, marks=pytest.mark.large),  # with biases of experts
        pytest.param("glm4_moe", {"pp": 2}, False, marks=pytest.mark.large),
    ],
    ids=str,
)
def test_weights_come_out_bit_for_bit_as_they_went_in(two_ranks, make_hf_model, tmp_path, family, settings, tied):
    """Parity compares them at every size, after two steps and to rounding."""

    def load_and_export(rank, world, address, folder, settings):
        return export(build_engine(rank, world, address, folder, settings))

    folder = make_vlm(tmp_path, family, tied) if family in SEEING else make_hf_model(family, tied)
    exported = two_ranks.run(load_and_export, draw_address(), folder, settings)
    want = load_file(f"{folder}/model.safetensors")
    (got,) = (e for e in exported if e)
    assert set(got) == set(want)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_rows_of_fused_projections_by_hand(one_rank, make_hf_model):
    """Of two key heads with a query and a key of two entries, and two values of three each: rows are numbered as a
    folder has them."""

    def join_and_split(rank, world, folder):
        spec = ModelSpec.from_folder(folder)
        mixer = DeltaMixer(DeltaNet(2, 2, 2, 3, 4), is_fused=True)
        (weight,) = (weight for weight in mixer(spec) if weight.name.endswith("in_proj.weight"))
        parts = [torch.arange(32.0)[:, None], 100 + torch.arange(8.0)[:, None]]
        whole = weight.join.join(parts)
        return whole.flatten().tolist(), [part.tolist() for part in weight.split(whole).values()]

    ((joined, (qkvz, ba)),) = one_rank.run(join_and_split, make_hf_model("qwen3_next", False))
    first = [*range(10), 102, 103, 100, 101, *range(10, 16)]  # query, key, values, a, b, gates of the output
    assert joined == [*first, *range(16, 26), 106, 107, 104, 105, *range(26, 32)]
    assert qkvz == [[row] for row in range(32)] and ba == [[row] for row in range(100, 108)]


def test_missing_and_unknown_tensors_are_named(one_rank, make_hf_model, tmp_path):
    def load(rank, world, address, folder):
        try:
            build_engine(rank, world, address, folder, {})
        except ValueError as error:
            return str(error)

    shutil.copytree(make_hf_model("qwen2", False), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.extra.weight"] = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    error = one_rank.run(load, draw_address(), str(tmp_path))[0]
    assert "missing ['model.layers.1.mlp.up_proj.weight']" in error
    assert "unexpected ['model.layers.0.extra.weight']" in error


def test_warm_up_starts_above_zero_and_the_last_step_of_a_decay_learns(one_rank, make_hf_model):
    """Four steps of warm-up, four of a cosine to min_lr; and four linear steps to 0 without a warm-up, by hand."""
    optimizers = replace(COSINE, min_lr=1e-4), OptimizerConfig(lr=1.0, lr_scheduler="linear", lr_decay_steps=4)

    def rates(rank, world, address, folder):
        engines = (build_engine(rank, world, address, folder, {"optimizer": each}) for each in optimizers)
        return [[r.lr for r in steps(engine, 9)] for engine in engines]

    cosine, straight = one_rank.run(rates, draw_address(), make_hf_model("qwen2", False))[0]
    assert cosine[:4] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])
    assert cosine[4:8] == pytest.approx([1e-4 + 9e-4 * (1 + math.cos(math.pi * k / 5)) / 2 for k in (1, 2, 3, 4)])
    assert cosine[8:] == pytest.approx([1e-4])
    assert straight == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("frozen", [True, False])
def test_a_reference_model_computes_the_same_and_holds_no_optimizer(one_rank, make_hf_model, frozen):
    def outputs(rank, world, address, folder, frozen):
        engine = build_engine(rank, world, address, folder, {}, trainable=not frozen, temperature=0.5)
        if frozen:
            assert engine.optimizer is None and not any(p.requires_grad for p in engine.module.parameters())
        schedule, shard = plan(engine, make_batch())
        return schedule.restore([engine.forward(shard, every=True)]).logprobs

    got = one_rank.run(outputs, draw_address(), make_hf_model("qwen2", False), frozen)[0]
    want = compute_logprobs(load_folder(make_hf_model("qwen2", False)), make_batch(), temperature=0.5)
    assert torch.allclose(got, want, atol=1e-5)


RESUMES = [("TP2", "TP2"), ("DP2", "PP2"), ("CP2", "TP2")]
MORE = [("DP2", "DP2"), ("TP2-CP2", "DP2-PP2"), ("DP2-PP2", "TP4")]
REST = [("TP2", "DP2"), ("DP4", "TP2-PP2"), ("TP4", "TP4"), ("TP4", "TP2-PP2")]
OF_EXPERTS = [("TP2-EP2", size) for size in ("TP2-EP2", "DP2-EP2", "PP2", "TP2-ETP2", "DP2", "CP2-EP2")]
OF_EXPERTS += [("DP2", "DP2-EP2"), ("TP2-DP2-EP2-ETP2", "PP2-DP2-EP2")]


def list_resumes(name: str, tied: bool, *runs: list) -> list:
    """List cases by run, as ``in_runs`` takes them."""
    return in_runs(*([((name, tied), *case) for case in cases] for cases in runs))


@pytest.mark.parametrize(
    ("model", "first", "then"),
    [
        *list_resumes("qwen2", True, RESUMES, MORE, REST),
        *list_resumes(
            "qwen3_moe-dense", False, [("TP2-EP2", "DP2-ETP2")], [], [("TP2-EP2", "TP2-EP2")]
        ),  # of two kinds
        *list_resumes("qwen3_moe", False, [], [*OF_EXPERTS[:3], OF_EXPERTS[-1]], OF_EXPERTS[3:-1]),
        *list_resumes("qwen3_5_text", True, [("TP2", "DP2")], [("CP2", "PP2")], [("PP2", "TP2")]),
        *list_resumes("qwen3_next", False, [], OF_EXPERTS[:1], OF_EXPERTS[1:3]),
        *list_resumes("glm4_moe", False, [("one", "one")], OF_EXPERTS[3:4], [*OF_EXPERTS[:3], OF_EXPERTS[4]]),
        *list_resumes("qwen3_moe-late", False, [], [("PP2", "DP2")], [("PP2", "PP2")]),
        *list_resumes("qwen3_moe-early", False, [], [("DP2", "PP2")], [("PP2", "PP2")]),
    ],
)
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(
    pool_of, make_hf_model, tmp_path, measured, model, first, then
):
    """Two steps, save, two more; then load into a fresh engine of the same or other sizes and repeat the last two."""
    own = {"router_bias_rate": 1e-2} if model[0] == "glm4_moe" else {}
    before, after = parse_size(first) | own, parse_size(then) | own

    def run(rank, world, first, second, folder, target, before, after):
        engine = build_engine(rank, world, first, folder, SETTINGS | before)
        steps(engine, 2)
        engine.save(target)
        uninterrupted = [r.lr for r in steps(engine, 2, seed=2)], export(engine)
        leave_groups()
        engine = build_engine(rank, world, second, folder, SETTINGS | after)
        steps(engine, 1, seed=5)  # so that there is an optimizer state to be replaced
        engine.load(target)
        return uninterrupted, ([r.lr for r in steps(engine, 2, seed=2)], export(engine))

    addresses, folder = (draw_address(), draw_address()), make_hf_model(*model)
    results = pool_of(first).run(run, *addresses, folder, str(tmp_path), before, after)
    (want_lr, _), (got_lr, _) = results[0]
    assert got_lr == want_lr
    want = next(first[1] for first, _ in results if first[1])
    got = next(second[1] for _, second in results if second[1])
    if before == after:
        assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
        return
    batches = [make_batch(seed) for seed in (1, 1, 2, 2)]
    rounding = measure_rounding(compute_weights, folder, batches, COSINE)
    check_distances({"weights": rounding.compare("weights", got, base=want)}, measured, f"{model} {first} {then}")


def test_an_incomplete_checkpoint_is_refused(one_rank, make_hf_model, tmp_path):
    def load(rank, world, address, folder, target):
        start_process(rank)
        try:
            build_engine(rank, world, address, folder, {}).load(target)
        except ValueError as error:
            return str(error)

    assert (
        "not a complete checkpoint"
        in one_rank.run(load, draw_address(), make_hf_model("qwen2", True), str(tmp_path))[0]
    )
