"""The Megatron engine against HuggingFace run one sequence at a time, in fp32, over parallel sizes and layouts."""

from functools import partial
from itertools import product

import pytest
import torch
from support.cover import in_runs, in_turn, matrix
from support.factors import (
    EXPERT_FAMILIES,
    EXPERT_SIZES,
    FAMILIES,
    FOUR_RANKS,
    LAYOUTS,
    MORE_EXPERT_SIZES,
    PLATFORMS,
    RECOMPUTE,
    SIZES,
    STATE_EXPERT_FAMILIES,
    STATE_FAMILIES,
    TIED,
    TWO_RANKS,
    parse_size,
)
from support.new_platform import NAME, run_on_added, write_platform
from support.ranks.engines_cases import LENGTHS, compute_steps, run_case
from support.ranks.pool import draw_address
from support.rounding import Rounding, check_distances, measure_rounding


@pytest.fixture(scope="module")
def reference(make_hf_model):
    made = {}

    def run(family: str, tied: bool) -> Rounding:
        if (family, tied) not in made:
            made[family, tied] = measure_rounding(compute_steps, make_hf_model(family, tied))
        return made[family, tied]

    return run


@pytest.fixture(scope="module")
def unsplit(one_rank, make_hf_model):
    """``unsplit(family, tied)``: the gradients of our own engine on one rank, in one bshd micro-batch."""
    made = {}

    def run(family: str, tied: bool) -> dict:
        if (family, tied) not in made:
            folder = make_hf_model(family, tied)
            (rank,) = one_rank.run(run_case, draw_address(), folder, {"layout": "bshd", "micro_batch_tokens": 10**6})
            made[family, tied] = rank["gradients"]
        return made[family, tied]

    return run


@pytest.fixture
def compare(pool_of, make_hf_model, reference, unsplit, measured):
    """``compare(size, family, tied, settings)``: run one case and check all of its numbers.

    ``platform`` names another than the CPU's, and ``run_on_rank`` what runs the case on a rank.
    """

    def run(size: str, family: str, tied: bool, settings: dict, platform="cpu", run_on_rank=run_case) -> None:
        settings = parse_size(size) | settings
        ranks = pool_of(size).run(run_on_rank, draw_address(), make_hf_model(family, tied), settings, platform)
        label = f"{size} {family} tied={tied} {settings}"
        check(ranks, reference(family, tied), unsplit(family, tied), measured, label)

    return run


def check(ranks: list[dict], want: Rounding, unsplit: dict, measured, label: str) -> None:
    leaders = sorted((r for r in ranks if r["is_leader"]), key=lambda r: r["dp_rank"])
    schedule = leaders[0]["schedule"]
    logits = schedule.restore_order(torch.cat([r["logits"] for r in leaders]))
    outputs = schedule.restore([r["outputs"] for r in leaders])
    exported = next(r for r in ranks if r["weights"])
    distances = {
        "logits": want.compare("logits", logits),
        "logprobs": want.compare("logprobs", outputs.logprobs),
        "entropy": want.compare("entropy", outputs.entropy),
        "gradients": want.compare("gradients", exported["gradients"]),
        "weights": want.compare("weights", exported["weights"]),
        "invariance": want.compare("gradients", exported["gradients"], base=unsplit),
    }
    check_distances(distances, measured, label)
    assert ranks[0]["grad_norms"] == pytest.approx(want.truth["norms"][""].tolist(), rel=1e-5)
    loads = want.truth["loads"].values()
    load = {}
    if loads:
        counted = torch.stack([*loads])
        load = {"expert_load_min": float(counted.min()), "expert_load_max": float(counted.max())}
    assert [r["routing"] for r in ranks] == [pytest.approx(load, rel=1e-6)] * len(ranks)
    step_logprobs = schedule.restore_order(torch.cat([r["step_logprobs"] for r in leaders]))
    assert torch.equal(step_logprobs, outputs.logprobs), "the update's own logprobs are those of the forward pass"


WIDELY = ("qwen2", "gemma3_text"), ("qwen2",)
"""Families that the default run has at every size of two ranks, and of four."""
MICRO = {"whole": {}, "split": {"micro_batch_tokens": 24}}
"""As few micro-batches as the sizes allow, or some of a single sequence."""


@matrix(
    {
        "size": SIZES,
        "family": FAMILIES,
        "tied": TIED,
        "layout": LAYOUTS,
        "recompute": RECOMPUTE,
        "micro": tuple(MICRO),
    },
    # Qwen2 has biases and Gemma windows on some layers; what the others have is cut by tensor parallelism alone, and is
    # the same at two ranks as at four.
    heavy=lambda case: case["size"] not in ("one", "TP2") and case["family"] not in WIDELY[case["size"] in FOUR_RANKS],
)
def test_parity(compare, size, family, tied, layout, recompute, micro):
    compare(size, family, tied == "tied", {"layout": layout, "recompute": recompute} | MICRO[micro])


@matrix(
    {"family": STATE_FAMILIES, "tied": TIED, "layout": LAYOUTS, "recompute": ("none", "core", "full")}
    | {"micro": tuple(MICRO)}
)
def test_states(compare, family, tied, layout, recompute, micro):
    compare("one", family, tied == "tied", {"layout": layout, "recompute": recompute} | MICRO[micro])


@matrix(
    {"size": (*TWO_RANKS, *FOUR_RANKS), "layout": LAYOUTS, "recompute": RECOMPUTE, "micro": tuple(MICRO)},
    heavy=lambda case: case["size"] not in ("TP2", "CP2"),  # which cut the heads of states and their sequences
)
def test_states_over_ranks(compare, size, layout, recompute, micro):
    compare(size, STATE_FAMILIES[0], False, {"layout": layout, "recompute": recompute} | MICRO[micro])


STATES_AND_EXPERTS = in_turn(
    ("one", "TP2", *EXPERT_SIZES), product((*STATE_EXPERT_FAMILIES, "qwen3_next-dense"), LAYOUTS)
)


@pytest.mark.parametrize(
    ("size", "family", "layout"),
    [
        ("one", "qwen3_next", "thd"),
        *(param for param in STATES_AND_EXPERTS if param.values != ("one", "qwen3_next", "thd")),
    ],
)
def test_states_and_experts(compare, size, family, layout):
    compare(size, family, False, {"layout": layout} | ({"recompute": "full"} if layout == "bshd" else MICRO["split"]))


@pytest.mark.parametrize(
    ("size", "family", "platform", "layout"),
    in_turn(
        [("CP2", STATE_FAMILIES[0]), *(("CP2-EP2", family) for family in STATE_EXPERT_FAMILIES)],
        product(PLATFORMS[1:], LAYOUTS),
    ),
)
def test_states_on_emulated_platforms(compare, size, family, platform, layout):
    """On CUDA by the calls of FLA's function, on an NPU by torch; layers of attention by the platform's calls."""
    compare(size, family, False, {"layout": layout}, platform)


def test_states_by_calls_of_fla(compare):
    compare("one", STATE_FAMILIES[0], False, {"layout": "thd", "recompute": "core"}, "cuda-emulated")


@matrix({"family": EXPERT_FAMILIES, "layout": LAYOUTS, "recompute": RECOMPUTE, "micro": tuple(MICRO)})
def test_experts(compare, family, layout, recompute, micro):
    compare("one", family, False, {"layout": layout, "recompute": recompute} | MICRO[micro])


@matrix(
    {"size": EXPERT_SIZES, "layout": LAYOUTS, "recompute": RECOMPUTE, "micro": tuple(MICRO)},
    # Experts are given tokens without a layout; stages have whole layers of them.
    heavy=lambda case: (case["layout"] == "bshd" and case["size"] != "CP2-EP2") or case["size"] == "PP2",
)
def test_experts_over_ranks(compare, size, layout, recompute, micro):
    compare(size, "qwen3_moe", False, {"layout": layout, "recompute": recompute} | MICRO[micro])


SIZES_IN_CI = ("TP2-DP2-EP2", "TP2-DP2-EP2-ETP2", "PP2-TP2-EP2", "CP2-DP2-EP4", "CP2-PP2-EP2")
"""Of the sizes of four ranks those that CI runs; the others are run by hand."""


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        *in_turn(SIZES_IN_CI, LAYOUTS),
        *in_runs(product=product((size for size in MORE_EXPERT_SIZES if size not in SIZES_IN_CI), LAYOUTS)),
    ],
)
def test_experts_over_more_ranks(compare, size, layout):
    """Some in micro-batches of one sequence with a shared expert, some of a model that begins with a dense layer."""
    family = "qwen2_moe" if layout == "thd" else "qwen3_moe-dense"
    settings = MICRO["split"] if layout == "thd" else {"recompute": "full"}
    compare(size, family, False, {"layout": layout} | settings)


@pytest.mark.parametrize(
    ("size", "layout"), [*in_turn(EXPERT_SIZES, LAYOUTS), *in_runs(product=product(MORE_EXPERT_SIZES, LAYOUTS))]
)
def test_experts_chosen_with_a_bias_over_ranks(compare, size, layout):
    settings = {"recompute": "full"} if layout == "thd" else MICRO["split"]
    compare(size, "glm4_moe", False, {"layout": layout} | settings)


@pytest.mark.parametrize(("size", "layout"), in_turn(("one", *EXPERT_SIZES), LAYOUTS))
def test_experts_on_an_npu(compare, size, layout):
    """Products of experts by the NPU's operator, both gradients among them."""
    settings = {"recompute": "full"} if layout == "thd" else MICRO["split"]
    compare(size, "qwen3_moe", False, {"layout": layout} | settings, "npu-emulated")


def test_experts_in_one_group(compare):
    compare("one", "glm4_moe-air", False, {})


@matrix(
    {"size": TWO_RANKS, "layout": LAYOUTS, "recompute": ("none", "core", "full")},
    # Gemma's windows are recomputed in the matrix of parity; replicas and stages have whole windows, as one rank has.
    heavy=lambda case: case["recompute"] == "full" or case["size"] in ("DP2", "PP2"),
)
def test_sliding_window(compare, size, layout, recompute):
    """Two pipeline micro-batches with different masks, a window on the upper layers only."""
    compare(size, "qwen2-window", False, {"layout": layout, "recompute": recompute, "micro_batch_tokens": 48})


SHARED_HEADS = [("TP2-CP2", "qwen2-one-head"), ("TP4", "qwen2"), ("TP4-EP2", "qwen3_moe"), ("TP4-EP2-ETP2", "glm4_moe")]
BY_HAND = [
    ("TP2", "qwen2-one-head"),
    ("TP2-PP2", "qwen3-one-head"),
    ("TP4", "qwen3"),
    ("TP4", "gemma3_text"),
]


@pytest.mark.parametrize(
    ("size", "family", "layout"),
    [
        *(("TP2", "qwen3-one-head", layout) for layout in LAYOUTS),
        *in_turn(SHARED_HEADS, LAYOUTS),
        *in_runs(product=((*case, layout) for case in BY_HAND for layout in LAYOUTS)),
    ],
)
def test_ranks_that_share_a_head_of_keys_and_values(compare, size, family, layout):
    compare(size, family, False, {"layout": layout} | (MICRO["split"] if layout == "bshd" else {"recompute": "core"}))


def test_scaled_rotary(compare):
    compare("one", "llama-rope3", False, {})


def test_a_new_platform_of_a_folder_and_a_line(compare, tmp_path):
    """It is the CPU's under another name, and as near to HuggingFace."""
    compare("CP2", "qwen2", True, {}, NAME, partial(run_on_added, write_platform(tmp_path), run_case))


def test_lengths_are_awkward():
    """The comparison covers what layouts get wrong: an empty and a one-token sequence, unequal lengths, padding at the
    end of the pack."""
    inputs = [n - 1 for n in LENGTHS]
    assert {0, 1} < set(inputs) and len(set(inputs)) == len(inputs) and inputs[-1] % 2 == 1
