"""Prompts that are computed once against the same engine and batch with each sample by itself."""

import pkgutil
import shutil
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from support.cover import matrix
from support.factors import FAMILIES, IMAGE_FAMILIES, PLATFORMS, parse_size
from support.models import make_vlm
from support.ranks.engines_cases import build_engine, plan, start_process
from support.ranks.pool import draw_address
from support.ranks.shared_cases import compute_both_ways, make_grouped
from support.ranks.vlm_cases import make_images

from engines.config import OptimizerConfig
from engines.models.spec import ModelSpec
from hardware.attention.mask_spec import expand_counts
from rlworker.checks.huggingface import probe_loss

LIMITS = {"logprobs": 5e-6, "entropy": 5e-6, "values": 5e-6, "gradients": 1e-6}
"""Largest absolute differences."""
OF_THE_LARGEST = 2e-6
"""Gradients of Gemma's embedding are multiplied by sqrt(hidden): the limit grows with the largest gradient."""
SIZES = ("one", "TP2", "PP2", "CP2")
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


def check(ranks: list[list[dict]], measured, label: str) -> None:
    outputs = []
    for way in range(2):
        leaders = sorted((r[way] for r in ranks if r[way]["outputs"]), key=lambda r: r["dp_rank"])
        columns = {n: torch.cat([r["outputs"][n] for r in leaders]) for n in leaders[0]["outputs"]}
        outputs.append({n: leaders[0]["schedule"].restore_order(column) for n, column in columns.items()})
    found = {name: float((column - outputs[1][name]).abs().max()) for name, column in outputs[0].items()}
    plain, shared = (ranks[0][way]["gradients"] for way in range(2))
    found["gradients"] = max(float((gradient - shared[name]).abs().max()) for name, gradient in plain.items())
    largest = max(float(gradient.abs().max()) for gradient in plain.values())
    measured(found)
    limits = LIMITS | {"gradients": max(LIMITS["gradients"], OF_THE_LARGEST * largest)}
    assert all(difference <= limits[name] for name, difference in found.items()), (label, found)
    assert plain.keys() == shared.keys() and largest > 1e-3
    schedules = [ranks[0][way]["schedule"] for way in range(2)]
    assert schedules[0].digest != schedules[1].digest
    assert schedules[0].count_computed() == sum(schedules[0].lengths) > schedules[1].count_computed()
    assert ranks[0][1]["slots"] <= ranks[0][0]["slots"]


@matrix({"size": SIZES, "platform": PLATFORMS, "settings": tuple(SETTINGS)})
def test_every_size_and_platform(pool_of, make_hf_model, measured, size, platform, settings):
    case = make_hf_model("qwen2", False), parse_size(size) | SETTINGS[settings], platform
    check(pool_of(size).run(compute_both_ways, draw_address(), *case), measured, f"{size} {platform}")


DEARER = [(size, *case) for case in zip(PLATFORMS, SETTINGS) for size in ("DP2", "TP2-CP2", "CP4")]
"""Sizes that take more ranks, or differ from one rank by little: two of them by default."""


@pytest.mark.parametrize(
    ("size", "platform", "settings"), [*DEARER[:2], *(pytest.param(*c, marks=pytest.mark.large) for c in DEARER[2:])]
)
def test_replicas_and_many_parts_of_a_sequence(pool_of, make_hf_model, measured, size, platform, settings):
    case = make_hf_model("qwen2", True), parse_size(size) | SETTINGS[settings], platform
    check(pool_of(size).run(compute_both_ways, draw_address(), *case), measured, f"{size} {platform}")


WINDOWED = ("gemma3_text", "qwen2-window")
"""Families that share trees, since those differ from prompts alone where a window ends within what is shared."""


@pytest.mark.parametrize("family", [*(name for name in FAMILIES if name != "qwen2"), "qwen2-window", "llama-rope3"])
def test_every_text_family(one_rank, make_hf_model, measured, family):
    """The matrix has qwen2."""
    tokens, share = (90, "tree") if family in WINDOWED else (40, "prompts")
    case = make_hf_model(family, True), {"micro_batch_tokens": tokens}, "cpu", None, share
    check(one_rank.run(compute_both_ways, draw_address(), *case), measured, family)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    paths = make_images(folder)
    shutil.copy(paths[0], folder / "other.png")
    with Image.open(folder / "other.png") as image:
        image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(folder / "other.png")
    return [*paths, str(folder / "other.png")]


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_every_family_with_images(one_rank, tmp_path, images, measured, family):
    """A group about another image of the same size, after the same ids, is another group. Of each way to see images
    both ways or not, one family shares trees."""
    share = "tree" if family in ("gemma3", "qwen3_vl") else "prompts"
    case = make_vlm(tmp_path, family, False), {"micro_batch_tokens": 300}, "cpu", images, share
    ranks = one_rank.run(compute_both_ways, draw_address(), *case)
    check(ranks, measured, family)
    if share == "prompts":
        assert (ranks[0][1]["schedule"].beginnings.common == 0).sum() == 6


@pytest.mark.large
@pytest.mark.parametrize(("size", "platform"), [("CP2", "cpu"), ("TP2-PP2", "npu-emulated")])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_images_over_ranks(pool_of, tmp_path, images, measured, size, family, platform):
    case = make_vlm(tmp_path, family, False), parse_size(size) | {"micro_batch_tokens": 300}, platform, images
    check(pool_of(size).run(compute_both_ways, draw_address(), *case), measured, f"{size} {family} {platform}")


def test_a_critic(one_rank, make_critic, measured):
    model = ModelSpec.from_folder(make_critic("qwen2"), head="value")
    check(one_rank.run(compute_both_ways, draw_address(), model, {"micro_batch_tokens": 60}), measured, "critic")


@pytest.mark.parametrize("size", ["one", pytest.param("TP2-CP2", marks=pytest.mark.large)])
@pytest.mark.parametrize(("platform", "settings"), zip(PLATFORMS, SETTINGS))
def test_trees(pool_of, make_hf_model, measured, size, platform, settings):
    case = make_hf_model("qwen2", False), parse_size(size) | SETTINGS[settings], platform, None, "tree"
    check(pool_of(size).run(compute_both_ways, draw_address(), *case), measured, f"tree {size} {platform}")


def step_both_ways(rank: int, world: int, address: str, folder: str) -> tuple[float, float]:
    optimizer, weights = OptimizerConfig(lr=1e-3, adam_eps=1e-5), []
    for share in ("none", "prompts"):
        engine = build_engine(rank, world, address, folder, {"optimizer": optimizer, "share": share})
        before = {name: tensor.clone() for name, tensor in engine.export_weights()}
        for seed in (1, 2, 3):
            batch = make_grouped(seed)
            engine.train_step(plan(engine, batch)[1], probe_loss, float(batch.mask.sum()))
        weights.append({name: tensor.clone() for name, tensor in engine.export_weights()})
    apart, moved = (
        max(float((tensor - other[name]).abs().max()) for name, tensor in weights[1].items())
        for other in (weights[0], before)
    )
    return apart, moved


def test_weights_after_three_steps(one_rank, make_hf_model, measured):
    apart, moved = one_rank.run(step_both_ways, draw_address(), make_hf_model("qwen2", True))[0]
    measured({"weights": apart})
    assert apart <= 1e-6 and moved > 2e-3


# -- faults that no probe of masks shows: who sees whom is right under each


def count_own_positions_from_0(forward):
    def run(self, module, micro, layout):
        if layout.sharing:
            owner, within = expand_counts(np.asarray(micro.lengths))
            begins = np.asarray(layout.sharing.counts)[owner]
            positions = np.where(within >= begins, within - begins, within)
            micro = replace(micro, positions=torch.from_numpy(positions))
        return forward(self, module, micro, layout)

    return run


def take_the_gradient_of_the_last_reader(gather):
    def read(self, local):
        rows, slots = gather(self, local), self.slots.tolist()
        last = {slot: place for place, slot in enumerate(slots)}
        is_last = torch.tensor([last[slot] == place for place, slot in enumerate(slots)])
        return torch.where(is_last[:, None], rows, rows.detach())

    return read


def score_one_target_for_all(outputs):
    def score(self, hidden, micro, layout):
        return outputs(self, hidden, replace(micro, targets=layout.unpack(layout.pack(micro.targets))), layout)

    return score


FAULTS = {
    "own positions from 0": ("engine.MegatronEngine", "forward_micro_batch", count_own_positions_from_0),
    "the gradient of one reader": ("layout.Layout", "gather_slots", take_the_gradient_of_the_last_reader),
    "one target for all": ("engine.MegatronEngine", "outputs", score_one_target_for_all),
}


def compute_with_fault(fault: str, rank: int, world: int, address: str, folder: str) -> list[dict]:
    start_process(rank)
    place, name, wrap = FAULTS[fault]
    owner = pkgutil.resolve_name(f"engines.megatron.{place.replace('.', ':')}")
    with patch.object(owner, name, wrap(getattr(owner, name))):
        return compute_both_ways(rank, world, address, folder, {})


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_sharing_is_found_by_parity(one_rank, make_hf_model, fault):
    ranks = one_rank.run(partial(compute_with_fault, fault), draw_address(), make_hf_model("qwen2", False))
    with pytest.raises(AssertionError, match="gradients"):
        check(ranks, lambda found: None, fault)
    plain, shared = (ranks[0][way]["gradients"] for way in range(2))
    assert max(float((gradient - shared[name]).abs().max()) for name, gradient in plain.items()) > 1e-4
