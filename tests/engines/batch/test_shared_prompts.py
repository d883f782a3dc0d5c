"""Prompts that are computed once against the same engine and batch with each sample by itself."""

import shutil
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from support.cover import in_runs, in_turn, matrix
from support.factors import (
    IMAGE_STATE_FAMILIES,
    PLATFORMS,
    STATE_EXPERT_FAMILIES,
    STATE_FAMILIES,
    parse_size,
)
from support.models import make_vlm
from support.ranks.engines_cases import build_engine, compute_weights, plan, start_process
from support.ranks.pool import draw_address
from support.ranks.shared_cases import (
    compute_alone,
    compute_both_ways,
    make_forked,
    make_grouped,
    make_grouped_images,
    make_stale,
    make_uneven,
)
from support.ranks.vlm_cases import make_images
from support.rounding import Rounding, check_distances, find_largest, measure_rounding

from engines.config import OptimizerConfig
from engines.models.spec import ModelSpec
from engines.probes.faults import mend, plant
from rlworker.checks.reference.huggingface import probe_loss

SIZES = ("one", "TP2", "PP2", "CP2", "TP2-CP2")
SETTINGS = {
    "whole": {},
    "cut, core again": {"micro_batch_tokens": 40, "recompute": "core"},
    "of a fixed size, all again": {
        "micro_batch_tokens": 128,
        "slots": 128,
        "pad_to_multiple_of": 2,
        "recompute": "full",
    },
}


def check(ranks: list[list[dict]], want: Rounding, measured, label: str) -> None:
    """Compare the two ways of all ranks, and check that the second computes less."""
    outputs = []
    for way in range(2):
        leaders = sorted((r[way] for r in ranks if r[way]["outputs"]), key=lambda r: r["dp_rank"])
        columns = {n: torch.cat([r["outputs"][n] for r in leaders]) for n in leaders[0]["outputs"]}
        outputs.append({n: leaders[0]["schedule"].restore_order(column) for n, column in columns.items()})
    plain, shared = (outputs[way] | {"gradients": ranks[0][way]["gradients"]} for way in range(2))
    assert plain.keys() == shared.keys()
    distances = {kind: want.compare(kind, numbers, base=plain[kind]) for kind, numbers in shared.items()}
    check_distances(distances, measured, label)
    assert max(float(gradient.abs().max()) for gradient in plain["gradients"].values()) > 1e-3
    schedules = [ranks[0][way]["schedule"] for way in range(2)]
    assert schedules[0].digest != schedules[1].digest
    assert schedules[0].count_computed() == sum(schedules[0].lengths) > schedules[1].count_computed()
    assert ranks[0][1]["slots"] <= ranks[0][0]["slots"]


@cache
def measure_alone(folder: str, head: str, make) -> Rounding:
    return measure_rounding(compute_alone, folder, head, make)


def compare(
    pool, measured, label: str, model, settings: dict, platform: str = "cpu", make=make_grouped, share: str = "prompts"
) -> list[list[dict]]:
    """Run both ways of a case of ``compute_both_ways`` on every rank, and compare them."""
    ranks = pool.run(compute_both_ways, draw_address(), model, settings, platform, make, share)
    folder, head = (model.folder, model.head) if isinstance(model, ModelSpec) else (model, "language")
    check(ranks, measure_alone(folder, head, make), measured, label)
    return ranks


ALWAYS = (
    ("TP2", "cpu", "cut, core again"),
    ("PP2", "cuda-emulated", "whole"),
    ("CP2", "npu-emulated", "of a fixed size, all again"),
)
"""Cases of the default run: each size of two ranks, platform and setting once. ``TREES`` has those of one rank."""
TREES = (
    ("cpu", "of a fixed size, all again"),
    ("cuda-emulated", "cut, core again"),
    ("npu-emulated", "whole"),
)
"""Each platform and setting once, in pairs that ``ALWAYS`` has not."""


@matrix(
    {"size": SIZES, "platform": PLATFORMS, "settings": tuple(SETTINGS)},
    heavy=lambda case: (case["size"], case["platform"], case["settings"]) not in ALWAYS,
)
def test_every_size_and_platform(pool_of, make_hf_model, measured, size, platform, settings):
    case = make_hf_model("qwen2", False), parse_size(size) | SETTINGS[settings], platform
    compare(pool_of(size), measured, f"{size} {platform}", *case)


@pytest.mark.parametrize(("platform", "size"), in_turn(PLATFORMS, ["DP2", "CP4"]))
def test_replicas_and_many_parts_of_a_sequence(pool_of, make_hf_model, measured, size, platform):
    case = make_hf_model("qwen2", True), parse_size(size) | {"micro_batch_tokens": 40}, platform
    compare(pool_of(size), measured, f"{size} {platform}", *case)


def test_a_replica_with_a_dummy(two_ranks, make_hf_model, measured):
    case = make_hf_model("qwen2", True), {"micro_batch_tokens": 40}, "cpu", make_uneven
    ranks = compare(two_ranks, measured, "dummy", *case)
    assert [rank[1]["dummies"] for rank in ranks] in ([0, 1], [1, 0])


@pytest.mark.parametrize("size", in_runs(default=["one"], large=["TP2", "CP2"]))
def test_a_loss_of_older_samples(pool_of, make_hf_model, measured, size):
    """At staleness 1: old, rollout and reference logprobs, centered scores, weights outside the mask. The forward pass
    is a reference's."""
    case = make_hf_model("qwen2", True), parse_size(size) | {"micro_batch_tokens": 90}, "cpu", make_stale
    ranks = compare(pool_of(size), measured, f"stale {size}", *case)
    assert "top_logprobs" in next(rank[1]["outputs"] for rank in ranks if rank[1]["outputs"])


@pytest.mark.parametrize(
    "family",
    in_runs(
        default=["gemma3_text"],
        large=["qwen2", "phi3", "qwen2-window", "llama-rope3"],
        product=["llama", "qwen3", "mistral"],
    ),
)
def test_every_text_family(one_rank, make_hf_model, measured, family):
    """By default the one that has windows, two rotations and norms of queries and keys."""
    compare(one_rank, measured, family, make_hf_model(family, True), {"micro_batch_tokens": 90})


@pytest.mark.parametrize(("size", "settings"), [("one", "whole"), *in_turn(SIZES[1:], SETTINGS)])
def test_states_that_are_handed_on(pool_of, make_hf_model, measured, size, settings):
    case = make_hf_model(STATE_FAMILIES[0], True), parse_size(size) | SETTINGS[settings], "cpu"
    compare(pool_of(size), measured, f"states {size}", *case)


@pytest.mark.parametrize(("size", "is_tree"), in_turn(["one", "TP2-CP2"], [True, False]))
def test_states_that_are_handed_on_by_calls_of_fla(pool_of, make_hf_model, measured, size, is_tree):
    case = make_hf_model(STATE_FAMILIES[0], True), parse_size(size) | SETTINGS["cut, core again"], "cuda-emulated"
    compare(pool_of(size), measured, f"states by FLA {size}", *case, *((make_forked, "tree") if is_tree else ()))


@pytest.mark.parametrize(("size", "family"), in_turn(["one", "TP2-EP2"], STATE_EXPERT_FAMILIES))
def test_states_that_are_handed_on_beside_experts(pool_of, make_hf_model, measured, size, family):
    case = make_hf_model(family, False), parse_size(size) | {"micro_batch_tokens": 90}, "cpu"
    compare(pool_of(size), measured, f"{family} {size}", *case)


@pytest.fixture(scope="module")
def make_images_batch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    paths = make_images(folder)
    shutil.copy(paths[0], folder / "other.png")
    with Image.open(folder / "other.png") as image:
        image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(folder / "other.png")
    return partial(make_grouped_images, [*paths, str(folder / "other.png")])


@pytest.mark.parametrize(
    "family",
    in_runs(
        default=["qwen3_vl"], large=["internvl", *IMAGE_STATE_FAMILIES], product=["qwen2_5_vl", "gemma3", "qwen2_vl"]
    ),
)
def test_every_family_with_images(one_rank, tmp_path, make_images_batch, measured, family):
    """A group about another image of the same size, after the same ids, is another group.

    By default the family whose positions have three parts and whose images enter several layers; the image rule is in
    ``test_trees_with_images``.
    """
    case = make_vlm(tmp_path, family, False), {"micro_batch_tokens": 300}, "cpu", make_images_batch
    ranks = compare(one_rank, measured, family, *case)
    assert (ranks[0][1]["schedule"].beginnings.common == 0).sum() == 6


@pytest.mark.parametrize(
    ("size", "family", "platform"),
    in_runs(
        large=[
            ("CP2", "qwen2_5_vl", "cpu"),
            ("PP2", "gemma3", "cuda-emulated"),
            ("TP2-PP2", "qwen3_vl", "npu-emulated"),
            ("CP2", "qwen3_5", "cpu"),
            ("TP2-EP2", "qwen3_5_moe", "cpu"),
        ],
        product=[
            ("CP2", "gemma3", "cpu"),
            ("CP2", "qwen3_vl", "cuda-emulated"),
            ("TP2-PP2", "qwen2_5_vl", "npu-emulated"),
            ("TP2-PP2", "qwen3_5", "cpu"),
            ("CP2", "qwen3_5", "cuda-emulated"),
        ],
    ),
)
def test_images_over_ranks(pool_of, tmp_path, make_images_batch, measured, size, family, platform):
    settings = parse_size(size) | {"micro_batch_tokens": 300}
    case = make_vlm(tmp_path, family, False), settings, platform, make_images_batch
    compare(pool_of(size), measured, f"{size} {family} {platform}", *case)


def test_a_critic(one_rank, make_critic, measured):
    model = ModelSpec.from_folder(make_critic("qwen2"), head="value")
    compare(one_rank, measured, "critic", model, {"micro_batch_tokens": 60})


@pytest.mark.parametrize(
    ("size", "platform", "settings"),
    in_runs(*([(size, *case) for case in TREES] for size in ("one", "TP2-CP2"))),
)
def test_trees(pool_of, make_hf_model, measured, size, platform, settings):
    case = make_hf_model("qwen2", False), parse_size(size) | SETTINGS[settings], platform, make_forked, "tree"
    compare(pool_of(size), measured, f"tree {size} {platform}", *case)


@pytest.mark.large
@pytest.mark.parametrize("family", ["gemma3_text", "qwen2-window"])
def test_trees_of_families_with_windows(one_rank, make_hf_model, measured, family):
    case = make_hf_model(family, False), {"micro_batch_tokens": 90}, "cpu", make_forked, "tree"
    compare(one_rank, measured, f"tree {family}", *case)


@pytest.mark.parametrize("family", in_runs(default=["gemma3"], large=IMAGE_STATE_FAMILIES, product=["qwen3_vl"]))
def test_trees_with_images(one_rank, tmp_path, make_images_batch, measured, family):
    case = make_vlm(tmp_path, family, False), {"micro_batch_tokens": 300}, "cpu", make_images_batch, "tree"
    compare(one_rank, measured, f"tree {family}", *case)


STEPS = OptimizerConfig(lr=1e-3, adam_eps=1e-5)
SEEDS = (1, 2, 3)
"""Of the batches of three steps."""


def step_both_ways(rank: int, world: int, address: str, folder: str) -> list[dict[str, torch.Tensor]]:
    """The weights before any step, and after three steps each way."""
    weights = []
    for share in ("none", "prompts"):
        engine = build_engine(rank, world, address, folder, {"optimizer": STEPS, "share": share})
        before = {name: tensor.clone() for name, tensor in engine.export_weights()}
        for seed in SEEDS:
            batch = make_grouped(seed=seed)
            engine.train_step(plan(engine, batch)[1], probe_loss, float(batch.mask.sum()))
        weights.append({name: tensor.clone() for name, tensor in engine.export_weights()})
    return [before, *weights]


def test_weights_after_three_steps(one_rank, make_hf_model, measured):
    folder = make_hf_model("qwen2", True)
    before, plain, shared = one_rank.run(step_both_ways, draw_address(), folder)[0]
    want = measure_rounding(compute_weights, folder, [make_grouped(seed=seed) for seed in SEEDS], STEPS)
    check_distances({"weights": want.compare("weights", shared, base=plain)}, measured, "three steps")
    assert max(find_largest(tensor, before[name]) for name, tensor in shared.items()) > 2e-3


# -- faults that the comparison above finds


def compute_with_fault(fault: str, rank: int, world: int, address: str, *case) -> list[dict]:
    plant(SimpleNamespace(platform=start_process(rank, case[2])), fault)
    try:
        return compute_both_ways(rank, world, address, *case)
    finally:
        mend(None)


FOUND_BY_PARITY = ("own positions from 0", "one target for all samples", "the gradient of one reader")
"""Who sees whom is right under each: no probe of masks shows them."""


@pytest.mark.parametrize("fault", FOUND_BY_PARITY)
def test_a_fault_of_sharing_is_found_by_parity(one_rank, make_hf_model, fault):
    folder = make_hf_model("qwen2", False)
    ranks = one_rank.run(partial(compute_with_fault, fault), draw_address(), folder, {}, "cpu")
    with pytest.raises(AssertionError, match="gradients"):
        check(ranks, measure_alone(folder, "language", make_grouped), lambda *values: None, fault)
    plain, shared = (ranks[0][way]["gradients"] for way in range(2))
    assert max(float((gradient - shared[name]).abs().max()) for name, gradient in plain.items()) > 1e-4
