"""Vision-language models against HuggingFace run one sequence at a time, in fp32, over parallel sizes and layouts."""

from itertools import product

import pytest
import torch
from support.cover import in_runs, in_turn, matrix
from support.factors import (
    EXPERT_SIZES,
    FOUR_RANKS,
    IMAGE_FAMILIES,
    IMAGE_STATE_FAMILIES,
    LAYOUTS,
    PLATFORMS,
    RECOMPUTE,
    SIZES,
    parse_size,
)
from support.huggingface import run_forward
from support.models import make_vlm
from support.ranks.pool import draw_address
from support.ranks.vlm_cases import make_images, make_vlm_batch, run_vlm_case
from support.ranks.vlm_parity import OPTIMIZER, check_vlm_ranks, measure_vlm_rounding
from support.rounding import Rounding

from engines.models.spec import ModelSpec
from rlworker.checks.reference.huggingface import load_huggingface, make_image_arguments, probe_loss


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    # Gemma as it is released: where stages are several, the first and the last share the embedding.
    tied = {"gemma3"}
    return {family: make_vlm(tmp_path_factory.mktemp(family), family, family in tied) for family in IMAGE_FAMILIES}


@pytest.fixture(scope="module")
def reference(folders, images):
    made = {}

    def run(family: str) -> Rounding:
        if family not in made:
            made[family] = measure_vlm_rounding(folders[family], images)
        return made[family]

    return run


@pytest.fixture
def compare(pool_of, folders, images, reference, measured):
    """``compare(size, family, settings)``: run one case, check its numbers, and say how many images a rank decoded at
    once at most."""

    def run(size: str, family: str, settings: dict) -> int:
        args = folders[family], images, parse_size(size) | settings
        ranks = pool_of(size).run(run_vlm_case, draw_address(), *args)
        check_vlm_ranks(ranks, reference(family), measured, f"{size} {family} {settings}", settings.get("freeze", ()))
        return max(max(rank["decoded"], default=0) for rank in ranks)

    return run


MICRO = {"whole": {}, "split": {"micro_batch_tokens": 45}}
"""As few micro-batches as the sizes allow; or several, with images and without."""
PARTS = ("vision", "projector", "language")
TILED = ("qwen3_vl", "internvl")
"""One family of each way to cut images."""


def can_learn(case: dict) -> bool:
    """Whether every pipeline stage has something to learn: the tower and the projector are on the first alone."""
    vision, projector, language = ("learns" in case[part] for part in PARTS)
    return language or ((vision or projector) and "PP" not in case["size"])


@matrix(
    {
        "size": SIZES,
        "family": IMAGE_FAMILIES,
        "layout": LAYOUTS,
        "recompute": RECOMPUTE,
        "micro": tuple(MICRO),
        **{part: (f"{part} learns", f"{part} frozen") for part in PARTS},
    },
    allowed=can_learn,
    heavy=lambda case: (
        (case["size"] in ("DP2", "PP2") and case["family"] not in TILED)
        or (case["size"] == "CP2" and case["family"] not in (*TILED, "gemma3"))
        or (case["size"] in FOUR_RANKS and case["family"] != TILED[0])
    ),
)
def test_parity(compare, size, family, layout, recompute, micro, vision, projector, language):
    frozen = tuple(state.split()[0] for state in (vision, projector, language) if "frozen" in state)
    at_once = compare(size, family, MICRO[micro] | {"layout": layout, "recompute": recompute, "freeze": frozen})
    # Sharing the images of a small micro-batch, four ranks have one each; others have more, and memory for them.
    assert at_once > 1 or (size, micro) == ("TP2-CP2", "split")


@pytest.fixture(scope="module")
def experts(tmp_path_factory, images):
    """A model with a dense layer between those of experts, and its reference after three steps."""
    folder = make_vlm(tmp_path_factory.mktemp("experts"), "qwen3_vl_moe", mlp_only_layers=[1])
    return folder, measure_vlm_rounding(folder, images, steps=3)


WITH_EXPERTS = [
    *(("cpu", "one", layout) for layout in LAYOUTS),
    *in_turn(product(("cpu",), EXPERT_SIZES), LAYOUTS),
    *in_turn(PLATFORMS[1:], product(("TP2-EP2", "one"), LAYOUTS)),
]


@pytest.mark.parametrize(("platform", "size", "layout"), WITH_EXPERTS)
def test_experts(pool_of, images, experts, measured, platform, size, layout):
    """Of the weights too, after three steps."""
    folder, reference = experts
    settings = parse_size(size) | {"layout": layout, "optimizer": OPTIMIZER, "steps": 3}
    ranks = pool_of(size).run(run_vlm_case, draw_address(), folder, images, settings, platform)
    check_vlm_ranks(ranks, reference, measured, f"{size} qwen3_vl_moe {layout} {platform}")


@pytest.mark.large
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_tower_learns_through_experts_where_some_micro_batches_have_no_image(
    pool_of, images, experts, measured, recompute
):
    """The language model is frozen, and ranks exchange rows of its experts on the way back, all of them or none."""
    folder, rows = experts[0], ((2,), (), (), ())
    settings = parse_size("DP2-EP2") | MICRO["split"] | {"freeze": ("language",), "recompute": recompute}
    ranks = pool_of("DP2-EP2").run(run_vlm_case, draw_address(), folder, images, settings, "cpu", rows)
    reference = measure_vlm_rounding(folder, images, rows)
    check_vlm_ranks(ranks, reference, measured, f"frozen experts, {recompute}", ("language", "router"))


@pytest.fixture(scope="module")
def states(tmp_path_factory, images):
    """A model of which most layers have a state, and its reference after three steps."""
    folder = make_vlm(tmp_path_factory.mktemp("states"), IMAGE_STATE_FAMILIES[0])
    return folder, measure_vlm_rounding(folder, images, steps=3)


WITH_STATES = [
    ("cpu", "one", "thd"),
    *in_runs(product=[("cpu", "one", "bshd")]),
    *in_turn([*product(("cpu",), SIZES[1:]), *product(PLATFORMS[1:], ("CP2",))], LAYOUTS),
]


@pytest.mark.parametrize(("platform", "size", "layout"), WITH_STATES)
def test_states(pool_of, images, states, measured, platform, size, layout):
    """Of the weights too, after three steps; recomputed where there are several stages, in several micro-batches where
    contexts are cut."""
    folder, reference = states
    settings = parse_size(size) | {"layout": layout, "optimizer": OPTIMIZER, "steps": 3}
    settings |= {"recompute": "full"} if "PP2" in size else {}
    settings |= MICRO["split"] if "CP2" in size else {}
    ranks = pool_of(size).run(run_vlm_case, draw_address(), folder, images, settings, platform)
    check_vlm_ranks(ranks, reference, measured, f"{size} qwen3_5 {layout} {platform}")


@pytest.fixture(scope="module")
def both_forms(tmp_path_factory, images):
    """``both_forms(form)``: a model with states and experts, in that form of its folder, and its reference after three
    steps."""
    made = {}

    def make(form: str) -> tuple[str, Rounding]:
        if form not in made:
            folder = make_vlm(tmp_path_factory.mktemp(form), IMAGE_STATE_FAMILIES[1], fused=form == "fused")
            made[form] = folder, measure_vlm_rounding(folder, images, steps=3)
        return made[form]

    return make


STATE_EXPERT_SIZES = ("one", "TP2", "CP2", *EXPERT_SIZES, "CP2-TP2-EP2", "PP2-DP2-EP2")
FORMS = (("fused", "thd"), ("each", "bshd"), ("each", "thd"), ("fused", "bshd"))
"""Form of the folder's experts, and layout."""
WITH_STATES_AND_EXPERTS = [
    *in_turn(product(("cpu",), STATE_EXPERT_SIZES), FORMS),
    *in_turn(PLATFORMS[1:], [("TP2-EP2", *form) for form in FORMS]),
]


@pytest.mark.parametrize(("platform", "size", "form", "layout"), WITH_STATES_AND_EXPERTS)
def test_states_and_experts(pool_of, images, both_forms, measured, platform, size, form, layout):
    """Of the weights too, after three steps, as ``test_states`` has them."""
    folder, reference = both_forms(form)
    settings = parse_size(size) | {"layout": layout, "optimizer": OPTIMIZER, "steps": 3}
    settings |= {"recompute": "full"} if "PP2" in size else {}
    settings |= MICRO["split"] if "CP2" in size else {}
    ranks = pool_of(size).run(run_vlm_case, draw_address(), folder, images, settings, platform)
    check_vlm_ranks(ranks, reference, measured, f"{size} {IMAGE_STATE_FAMILIES[1]} {form} {layout} {platform}")


@pytest.mark.parametrize(
    "family",
    in_runs(default=TILED, large=["gemma3"], product=[f for f in IMAGE_FAMILIES if f not in (*TILED, "gemma3")]),
)
def test_parity_where_some_ranks_see_no_image(four_ranks, folders, images, measured, family):
    """One image over four ranks, in two of three sequences."""
    rows = ((2,), (), (2,))
    ranks = four_ranks.run(run_vlm_case, draw_address(), folders[family], images, {"tp": 2, "cp": 2}, "cpu", rows)
    reference = measure_vlm_rounding(folders[family], images, rows)
    check_vlm_ranks(ranks, reference, measured, f"{family} TP2-CP2 one image")


def test_the_image_rule_moves_the_test_model(folders, images):
    """Else parity would prove nothing of it: at least 0.3 in a logit, in fp32, against the same model read causally."""
    spec = ModelSpec.from_folder(folders["gemma3"])
    model, batch, see = load_huggingface(spec), make_vlm_batch(spec, images), make_image_arguments(spec)

    def read_causally(one):
        return {name: x * (name != "token_type_ids") for name, x in see(one).items()}

    with torch.no_grad():
        both_ways, causal = (run_forward(model, spec, batch, probe_loss, arguments=a) for a in (see, read_causally))
    assert float((both_ways.logits - causal.logits).abs().max()) >= 0.3


def test_internvl_on_qwen3(one_rank, tmp_path, images, measured):
    """Its other language model; the matrix has it on Qwen2."""
    folder = make_vlm(tmp_path, "internvl", tied=True, model_type="qwen3", head_dim=48)
    ranks = one_rank.run(run_vlm_case, draw_address(), folder, images, {"layout": "thd"})
    check_vlm_ranks(ranks, measure_vlm_rounding(folder, images), measured, "internvl on qwen3")


EMULATED = (("cuda-emulated", "thd"), ("cuda-emulated", "bshd"), ("npu-emulated", "bshd"))


@pytest.mark.parametrize(("platform", "layout"), EMULATED)
def test_images_both_ways_on_emulated_devices(pool_of, folders, images, reference, measured, platform, layout):
    args = folders["gemma3"], images, {"layout": layout}, platform
    check_vlm_ranks(pool_of("one").run(run_vlm_case, draw_address(), *args), reference("gemma3"), measured, platform)


OTHERS = {
    "CP2, one image at a time": ("CP2", {"budget": 1}),
    "TP2 with slots": ("TP2", {"slots": 160, "recompute": "core"}),
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("family", in_runs(default=["qwen3_vl"], large=["qwen2_5_vl"]))
def test_parity_otherwise(compare, family, case):
    """Where there is memory for one image, one is decoded at once; packs of a fixed size."""
    size, settings = OTHERS[case]
    assert (compare(size, family, settings) == 1) == ("budget" in settings)
