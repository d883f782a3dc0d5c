"""Adapters against PEFT on transformers, one sequence at a time, in fp32, over parallel sizes and layouts."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.cover import in_runs, in_turn, matrix
from support.factors import (
    FAMILIES,
    FOUR_RANKS,
    IMAGE_FAMILIES,
    LAYOUTS,
    PLATFORMS,
    RECOMPUTE,
    STATE_FAMILIES,
    TWO_RANKS,
    parse_size,
)
from support.huggingface import load_folder
from support.models import make_vlm
from support.ranks.adapter_cases import (
    OPTIMIZER,
    compute_peft,
    find_frozen,
    load_peft,
    run_adapter_case,
    run_steps,
    run_view,
    write_folder,
)
from support.ranks.pool import draw_address
from support.ranks.vlm_cases import make_images
from support.rounding import Rounding, check_distances, measure_rounding

from engines.config import LoraConfig
from engines.models.spec import ModelSpec

LORA = {
    "all": LoraConfig(rank=4, alpha=6.0),
    "some": LoraConfig(rank=3, alpha=2.0, targets=("q_proj", "v_proj", "up_proj", "down_proj"), scaling="rslora"),
    "fused": LoraConfig(rank=3, alpha=2.0, targets=("qkv_proj", "down_proj"), scaling="rslora"),
    "attention": LoraConfig(rank=4, alpha=6.0, targets=("attention",)),
    "experts": LoraConfig(rank=4, alpha=6.0, targets=("attention", "experts")),
    "experts alone": LoraConfig(rank=4, alpha=6.0, targets=("experts",)),
    "sight": LoraConfig(rank=4, alpha=6.0, targets=("attention", "mlp", "vision", "projector")),
    "tower": LoraConfig(rank=4, alpha=6.0, targets=("vision",)),
    "states": LoraConfig(
        rank=3, alpha=2.0, targets=("in_proj_qkv", "in_proj_b", "in_proj_z", "v_proj"), scaling="rslora"
    ),
    "fused_states": LoraConfig(rank=3, alpha=2.0, targets=("in_proj_ba", "out_proj", "k_proj"), scaling="rslora"),
    "shared": LoraConfig(rank=4, alpha=6.0, targets=("attention", "gate_proj", "down_proj")),
}
"""Adapters of all layers, and of some of those that Megatron has in one."""


@pytest.fixture(scope="module")
def peft(make_hf_model):
    made = {}

    def run(family: str, lora: str) -> Rounding:
        if (family, lora) not in made:
            made[family, lora] = measure_rounding(compute_peft, make_hf_model(family, is_tied(family)), LORA[lora])
        return made[family, lora]

    return run


@pytest.fixture
def compare(pool_of, make_hf_model, peft, measured, tmp_path):
    """``compare(size, family, lora, settings)``: run one case and check all of its numbers."""

    def run(size: str, family: str, lora: str, settings: dict, platform: str = "cpu", images: tuple = ()) -> None:
        settings = parse_size(size) | settings | {"lora": LORA[lora]}
        folder = make_vlm(tmp_path, family) if images else make_hf_model(family, is_tied(family))
        want = measure_rounding(compute_peft, folder, LORA[lora], images) if images else peft(family, lora)
        ranks = pool_of(size).run(run_adapter_case, draw_address(), folder, settings, platform, images)
        leaders = sorted((rank for rank in ranks if rank["is_leader"]), key=lambda rank: rank["dp_rank"])
        logits = leaders[0]["schedule"].restore_order(torch.cat([rank["logits"] for rank in leaders]))
        (merged,) = (rank["merged"] for rank in ranks if rank["merged"])
        for rank in ranks:
            distances = {
                "logits": want.compare("logits", logits),
                "gradients": want.compare("gradients", rank["gradients"]),
                "adapters": want.compare("adapters", rank["adapters"]),
                "merged": want.compare("merged", merged),
            }
            check_distances(distances, measured, f"{size} {family} {lora} {settings}")
        assert ranks[0]["grad_norms"] == pytest.approx(want.truth["norms"][""].tolist(), rel=1e-5)

    return run


def is_tied(family: str) -> bool:
    return family != "qwen3_next"  # whose folders may not tie it


def choose_lora(family: str, lora: str) -> str:
    return "fused" if (family, lora) == ("phi3", "some") else lora


@matrix(
    {"family": (*FAMILIES, *STATE_FAMILIES), "lora": ("all", "some"), "layout": LAYOUTS, "recompute": RECOMPUTE},
    heavy=lambda case: case["family"] in ("llama", "qwen3", "mistral"),  # which have no layers of their own
)
def test_adapters_are_those_of_peft(compare, family, lora, layout, recompute):
    compare("one", family, choose_lora(family, lora), {"layout": layout, "recompute": recompute})


@matrix(
    {"size": (*TWO_RANKS, *FOUR_RANKS), "lora": ("all", "some"), "layout": LAYOUTS, "recompute": RECOMPUTE},
    heavy=lambda case: case["size"] in FOUR_RANKS,  # adapters are cut by one group at a time
)
def test_adapters_over_ranks(compare, size, lora, layout, recompute):
    compare(size, "qwen2", lora, {"layout": layout, "recompute": recompute})


@pytest.mark.parametrize(
    ("size", "family", "lora"),
    in_runs(
        default=[
            ("TP2", "qwen2-one-head", "all"),  # ranks share a head of keys and values, and cut rows of queries
            ("one", "qwen3_moe", "experts"),
        ],
        large=[
            ("TP2", "phi3", "fused"),  # gate and up are one layer, of which each half is cut
            ("TP2", "qwen3_5_text", "states"),
            ("TP2-EP2", "qwen3_moe", "experts"),
            ("TP2", "qwen2_moe", "shared"),
        ],
        product=[
            ("TP2", "gemma3_text", "some"),
            ("TP2", "qwen3_5_text", "all"),
            ("PP2", "qwen3_5_text", "some"),
            ("CP2", "qwen3_5_text", "states"),
            ("TP2", "qwen3_next", "attention"),
            ("one", "qwen3_next", "fused_states"),
            ("DP2-EP2", "qwen3_moe", "experts"),
            ("PP2", "qwen3_moe", "experts"),
            ("one", "qwen2_moe", "experts"),
            ("DP2-EP2", "qwen2_moe", "shared"),
            ("TP4", "qwen2", "some"),
            ("DP2-EP2", "qwen3_moe", "attention"),
        ],
    ),
)
def test_adapters_of_awkward_layers(compare, size, family, lora):
    compare(size, family, lora, {})


@pytest.mark.parametrize(
    ("size", "family", "lora"),
    in_runs(
        default=[("TP2", "qwen2_5_vl", "sight")],
        large=[("PP2", "qwen2_5_vl", "sight"), ("TP2", "qwen3_vl", "tower")],
        product=[
            ("one", "qwen2_5_vl", "tower"),
            ("CP2", "qwen2_5_vl", "attention"),
            ("one", "qwen3_vl", "sight"),
            ("one", "gemma3", "sight"),
            ("one", "internvl", "sight"),
            ("TP2", "qwen3_5", "sight"),
        ],
    ),
)
def test_adapters_of_models_that_see_images(compare, tmp_path, size, family, lora):
    compare(size, family, lora, {}, images=tuple(make_images(tmp_path)))


@pytest.mark.parametrize(("layout", "platform"), in_turn(LAYOUTS, PLATFORMS[1:]))
def test_adapters_on_emulated_platforms(compare, platform, layout):
    compare("CP2", "llama", "all", {"layout": layout}, platform)


@pytest.mark.parametrize("size", ["one", "TP2", "PP2"])
def test_the_view_without_adapters_is_a_second_engine_bit_for_bit(pool_of, make_hf_model, size):
    """Adapters alone have gradients; switching them off and on again leaves the actor as it is."""
    settings, folder = parse_size(size) | {"lora": LORA["some"]}, make_hf_model("qwen2", True)
    ranks = pool_of(size).run(run_view, draw_address(), folder, settings)
    leader = next(rank for rank in ranks if rank["actor"])
    view, second, actor, again = (leader[name].logprobs for name in ("view", "second", "actor", "again"))
    assert torch.equal(view, second) and torch.equal(actor, again)
    assert float((view - actor).abs().max()) > 1e-2
    for rank in ranks:
        assert rank["learning"] and all(".adapter." in name for name in rank["learning"])
        assert rank["gradients"] < 20_000, "no buffer has room for a weight's gradient"


@pytest.mark.large
def test_a_checkpoint_has_adapters_alone_and_goes_on_at_other_sizes(pool_of, make_hf_model, tmp_path):
    from torch.distributed.checkpoint import FileSystemReader

    folder = make_hf_model("qwen2", True)

    def run(size: str, source: str, target: str, steps: int) -> list[dict]:
        settings, paths = (
            parse_size(size) | {"lora": LORA["all"]},
            [name and str(tmp_path / name) for name in (source, target)],
        )
        if target:
            (tmp_path / target).mkdir()
        settings = parse_size(size) | {"lora": LORA["all"]}
        return pool_of(size).run(run_steps, draw_address(), folder, settings, (*paths, steps))

    (whole,), (first,) = run("one", "", "", 4), run("one", "", "two", 2)
    (resumed,) = run("one", "two", "", 2)
    assert first["norms"] + resumed["norms"] == whole["norms"]
    assert all(torch.equal(tensor, whole["adapters"][name]) for name, tensor in resumed["adapters"].items())
    stored = FileSystemReader(tmp_path / "two").read_metadata().state_dict_metadata
    sizes = [math.prod(each.size) for name, each in stored.items() if ".adapter." in name]
    assert sum(sizes) == 4 * sum(tensor.numel() for tensor in whole["adapters"].values()), "master and two moments"
    assert not any(name.endswith(".weight") for name in stored)
    for size in ("TP2", "PP2", "CP2"):
        ranks = run(size, "two", f"from-{size}", 1)
        assert all(rank["norms"] == pytest.approx(whole["norms"][2:3], rel=1e-5) for rank in ranks)
        (back,) = run("one", f"from-{size}", "", 1)
        assert back["norms"] == pytest.approx(whole["norms"][3:], rel=1e-5)


@pytest.mark.parametrize("offloads", [0.0, 0.5])
def test_a_checkpoint_of_adapters_of_experts_alone_goes_on(one_rank, make_hf_model, tmp_path, offloads):
    """Nothing that every rank has learns, for which Megatron's optimizer has an empty part."""
    optimizer = replace(OPTIMIZER, offload_fraction=offloads)
    settings = {"lora": LORA["experts alone"], "optimizer": optimizer}

    def run(source: str, target: str, steps: int) -> dict:
        (tmp_path / "one").mkdir(exist_ok=True)
        paths = [name and str(tmp_path / name) for name in (source, target)]
        (rank,) = one_rank.run(run_steps, draw_address(), make_hf_model("qwen3_moe", True), settings, (*paths, steps))
        return rank

    whole, first, second = run("", "", 2), run("", "one", 1), run("one", "", 1)
    assert first["norms"] + second["norms"] == whole["norms"] and min(whole["norms"]) > 0
    assert all(torch.equal(tensor, whole["adapters"][name]) for name, tensor in second["adapters"].items())


@pytest.mark.large
@pytest.mark.parametrize("lora", ["experts", "experts alone"])
def test_a_checkpoint_of_adapters_of_experts_goes_on_at_other_sizes(pool_of, make_hf_model, tmp_path, lora):
    folder = make_hf_model("qwen3_moe", True)

    def run(size: str, source: str, target: str, steps: int) -> dict:
        paths = [name and str(tmp_path / name) for name in (source, target)]
        if target:
            (tmp_path / target).mkdir()
        settings = parse_size(size) | {"lora": LORA[lora]}
        return pool_of(size).run(run_steps, draw_address(), folder, settings, (*paths, steps))[0]

    whole, first = run("one", "", "", 3), run("DP2-EP2", "", "one", 1)
    assert first["norms"] == pytest.approx(whole["norms"][:1], rel=1e-5)
    assert run("TP2-EP2", "one", "two", 1)["norms"] == pytest.approx(whole["norms"][1:2], rel=1e-5)
    assert run("one", "two", "", 1)["norms"] == pytest.approx(whole["norms"][2:], rel=1e-5)


def test_weights_in_bfloat16_are_merged_in_fp32_and_rounded_once(one_rank, make_hf_model):
    folder, lora = make_hf_model("qwen3", False), LORA["all"]
    settings = {"dtype": "bfloat16", "lora": lora}
    (rank,) = one_rank.run(run_steps, draw_address(), folder, settings, ("", "", 0))
    base = {name: tensor.bfloat16().float() for name, tensor in load_file(Path(folder, "model.safetensors")).items()}
    assert set(rank["merged"]) == set(base)
    for adapter in lora.list_adapters(ModelSpec.from_folder(folder)):
        for name in adapter.targets:
            place = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            a, b = (rank["adapters"][f"{place}{kind}.weight"].float() for kind in "AB")
            base[name] += lora.scale * b @ a
    changed = {name: (rank["merged"][name] - tensor.bfloat16()).abs().max() for name, tensor in base.items()}
    # A sum between two numbers may go to either of them, where fp32 adds up in another order.
    assert all(float(change) <= 2**-8 * float(base[name].abs().max()) for name, change in changed.items())
    equal = sum(int((rank["merged"][name] == tensor.bfloat16()).sum()) for name, tensor in base.items())
    assert equal / sum(tensor.numel() for tensor in base.values()) > 0.999


@pytest.mark.parametrize(
    ("size", "dtype"),
    in_runs(default=[("one", "bfloat16")], large=[("TP2", "bfloat16")], product=[("one", "float32")]),
)
def test_weights_sent_without_their_adapters_are_found_by_digests(pool_of, make_hf_model, size, dtype):
    """In bfloat16 too, whose logprobs are too coarse to show a single update (verl#7495)."""
    settings = parse_size(size) | {"dtype": dtype, "lora": LoraConfig(rank=4)}
    ranks = pool_of(size).run(find_frozen, draw_address(), make_hf_model("qwen2", False), settings)
    found = {moment: [name for rank in ranks for name in rank[moment]] for moment in ranks[0]}
    assert not found["before"] + found["after"] + found["mended"], "B is zero at first, and then all arrives"
    assert len(found["planted"]) == 8 and all(name.endswith("_proj.weight") for name in found["planted"]), found


@pytest.mark.parametrize(
    ("size", "family", "lora"),
    in_runs(
        default=[("one", "phi3", "fused"), ("TP2", "qwen3", "some"), ("PP2", "qwen2", "all")],
        large=[
            ("TP2", "qwen2_5_vl", "sight"),
            ("one", "gemma3", "attention"),
            ("TP2", "qwen3_5_text", "states"),
            ("DP2-EP2", "qwen3_moe", "experts"),
        ],
    ),
)
def test_a_folder_goes_from_peft_through_ranks_and_back_bit_for_bit(
    pool_of, make_hf_model, tmp_path, size, family, lora
):
    from peft import PeftModel

    folder = make_vlm(tmp_path / "model", family) if family in IMAGE_FAMILIES else make_hf_model(family, True)
    source, target = str(tmp_path / "peft"), str(tmp_path / "ours")
    spec, lora = ModelSpec.from_folder(folder), LORA[lora]
    load_peft(spec, lora).save_pretrained(source)
    settings = parse_size(size) | {"lora": replace(lora, start=source)}
    settings["lora"].check_model(spec, settings.get("pp", 1))
    written = pool_of(size).run(write_folder, draw_address(), folder, settings, target)
    assert sorted(map(len, written)) == [0] * (len(written) - 1) + [2]
    (ours, theirs) = (load_file(Path(place, "adapter_model.safetensors")) for place in (target, source))
    assert set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
    back = PeftModel.from_pretrained(load_folder(folder), target).state_dict()
    assert all(torch.equal(back[name.replace(".weight", ".default.weight")], theirs[name]) for name in theirs)
    assert PeftModel.from_pretrained(load_folder(folder), target).peft_config["default"].lora_alpha == lora.alpha
