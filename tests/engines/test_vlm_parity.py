"""Vision-language models against HuggingFace run one sequence at a time, in fp32, over parallel sizes and layouts."""

from itertools import product

import pytest
import torch
from ranks import free_address
from transformers import AutoModelForImageTextToText
from vlm_cases import ROWS, make_pictures, make_vlm, part_of_hf, run_vlm_case, vlm_batch

from engines.models import ModelSpec
from engines.pixels import ImageProcessor

LIMITS = {"logits": 1e-5, "logprobs": 1e-5, "gradients": 1e-6}
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
SIZES = {
    "one": {},
    "TP2": {"tp": 2},
    "CP2": {"cp": 2},
    "PP2": {"pp": 2},
    "TP2-CP2": {"tp": 2, "cp": 2},
    "TP2-PP2": {"tp": 2, "pp": 2},
    "CP2-PP2": {"cp": 2, "pp": 2},
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: make_vlm(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture(scope="module")
def reference(folders, pictures):
    """``reference(family)``: logits, logprobs, and gradients by the names in the folder."""
    made = {}

    def run(family: str) -> dict:
        if family not in made:
            made[family] = hf_results(folders[family], pictures)
        return made[family]

    return run


def hf_results(folder: str, pictures, rows=ROWS) -> dict:
    model = ModelSpec.from_folder(folder)
    batch, vision = vlm_batch(model, pictures, rows), model.vision
    processor = ImageProcessor(folder, vision)
    hf = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    logits, logprobs, loss = [], [], torch.zeros(())
    for i in range(len(batch)):
        one = batch.select(i, i + 1)
        ids, images = one.inputs[None], one.images[0]
        shown = {}
        if images:
            shown["pixel_values"] = torch.cat([processor.patches([image]) for image in images])
            shown["image_grid_thw"] = torch.tensor([image.grid for image in images])
        kinds = (ids == vision.image_token).int()
        logits.append(hf(ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **shown).logits[0])
        allowed = logits[-1].clone()
        allowed[:, list(vision.banned_tokens)] = -1e30
        log_p = allowed.log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        chosen = log_p.gather(-1, one.targets[:, None])[:, 0]
        logprobs.append(chosen)
        loss = loss - ((one.advantages * chosen + 0.1 * entropy) * one.mask).sum()
    (loss / batch.mask.sum()).backward()
    gradients = {model.name_in_folder(name): parameter.grad for name, parameter in hf.named_parameters()}
    return {
        "logits": torch.cat(logits).detach(),
        "logprobs": torch.cat(logprobs).detach(),
        "gradients": gradients,
        "mask": batch.mask,
    }


CASES = list(product(FAMILIES, SIZES, ("thd", "bshd")))
LARGE = [case for case in CASES if "-PP2" in case[1] or (case[2] == "bshd" and case[1] in ("TP2", "CP2", "PP2"))]
"""What differs in them, others have too."""


@pytest.mark.parametrize(
    ("family", "sizes", "layout"),
    [pytest.param(*case, marks=pytest.mark.large if case in LARGE else ()) for case in CASES],
)
def test_parity(request, folders, pictures, reference, capsys, family, sizes, layout):
    world = 1
    for size in SIZES[sizes].values():
        world *= size
    pool = request.getfixturevalue({1: "one_rank", 2: "two_ranks", 4: "four_ranks"}[world])
    ranks = pool.run(run_vlm_case, free_address(), folders[family], pictures, SIZES[sizes] | {"layout": layout})
    check(ranks, reference(family), capsys, f"{family} {sizes} {layout}")


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_where_some_ranks_see_no_picture(four_ranks, folders, pictures, capsys, family):
    """One picture over four ranks, in two of three sequences."""
    rows = ((2,), (), (2,))
    ranks = four_ranks.run(run_vlm_case, free_address(), folders[family], pictures, {"tp": 2, "cp": 2}, "cpu", rows)
    check(ranks, hf_results(folders[family], pictures, rows), capsys, f"{family} TP2-CP2 one picture")


OTHERS = {
    "recomputed, several micro-batches": {"recompute": "full", "micro_batch_tokens": 45},
    "PP2 recomputed, several micro-batches": {"pp": 2, "recompute": "full", "micro_batch_tokens": 45},
    "DP2": {"layout": "bshd"},
    "CP2, one picture at a time": {"cp": 2, "budget": 1},
    "TP2, language frozen": {"tp": 2, "freeze": ("language",), "micro_batch_tokens": 45},
    "CP2, vision and projector frozen": {"cp": 2, "freeze": ("vision", "projector"), "micro_batch_tokens": 45},
    "PP2, vision frozen, recomputed": {"pp": 2, "freeze": ("vision",), "recompute": "full"},
    "TP2 with slots": {"tp": 2, "slots": 160, "recompute": "core"},
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("family", [pytest.param("qwen2_5_vl", marks=pytest.mark.large), "qwen3_vl"])
def test_parity_otherwise(two_ranks, folders, pictures, reference, capsys, family, case):
    """Layers recomputed; micro-batches with and without pictures; ranks of which one has fewer, or none."""
    ranks = two_ranks.run(run_vlm_case, free_address(), folders[family], pictures, OTHERS[case])
    check(ranks, reference(family), capsys, f"{family} {case}", OTHERS[case].get("freeze", ()))
    at_once = max(max(rank["decoded"], default=0) for rank in ranks)
    assert (at_once == 1) == ("budget" in OTHERS[case]), "more than one at once but where there is memory for one"


def check(ranks: list[dict], want: dict, capsys, label: str, frozen: tuple[str, ...] = ()) -> None:
    schedule = ranks[0]["schedule"]
    leaders = sorted((rank for rank in ranks if rank["is_leader"]), key=lambda rank: rank["dp_rank"])
    logits = schedule.in_order(torch.cat([rank["logits"] for rank in leaders]))
    outputs = schedule.restore([rank["outputs"] for rank in leaders])
    mask = want["mask"]
    found = {
        "logits": float((logits - want["logits"]).abs().max()),
        "logprobs": float((outputs.logprobs - want["logprobs"])[mask].abs().max()),
    }
    differences = {}
    for rank in ranks:
        assert set(rank["gradients"]) == set(want["gradients"])
        for name, gradient in rank["gradients"].items():
            if part_of_hf(name) in frozen:
                assert not gradient.any()
                continue
            difference = float((gradient - want["gradients"][name]).abs().max())
            differences[name] = max(differences.get(name, 0.0), difference)
    worst = max(differences, key=differences.get)
    found["gradients"] = differences[worst]
    with capsys.disabled():
        print(f"\n{label}: " + "  ".join(f"{k} {v:.1e}" for k, v in found.items()), worst, end="")
    assert all(found[name] <= limit for name, limit in LIMITS.items()), (label, found, worst)
