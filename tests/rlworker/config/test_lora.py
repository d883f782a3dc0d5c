"""Settings of adapters: contradictions are refused by name, and layers are those of PEFT's names."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from support.models import make_vlm
from support.program import run_program

from engines.config import LoraConfig, MegatronConfig
from engines.models.folders.adapter_folder import save_adapter_folder
from engines.models.spec import ModelSpec
from rlworker.config.algorithm import AlgorithmConfig
from rlworker.config.command_line import parse_config
from rlworker.config.memory import list_needs
from rlworker.config.run import RunConfig
from rlworker.config.sections import CriticConfig, PlacementConfig


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoraConfig(rank=-1), "actor.lora: rank must be 0 or more, got -1; change --actor.lora.rank"),
        (lambda: LoraConfig(rank=4, alpha=0.0), "alpha must be above 0 and finite, got 0.0"),
        (lambda: LoraConfig(rank=4, scaling="dora"), "scaling must be one of 'lora', 'rslora', got 'dora'"),
        (lambda: LoraConfig(targets=("attention",)), "rank=0 trains all weights, and other settings of adapters do"),
        (
            lambda: MegatronConfig(lora=LoraConfig(rank=4), freeze=("language",)),
            r"lora.rank=4 keeps all weights .* freeze=\('language',\) contradicts; .* set --actor.freeze without",
        ),
        (
            lambda: MegatronConfig(lora=LoraConfig(rank=4), router_bias_rate=0.1),
            "router_bias_rate=0.1 contradicts; leave --actor.lora.rank out, or set --actor.router-bias-rate 0,",
        ),
    ],
)
def test_contradictions_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("family", "targets", "pp", "message"),
    [
        ("llama", ("query",), 1, r"targets names \['query'\], expected attention, mlp or some of \['down_proj', 'gate"),
        ("phi3", ("q_proj",), 1, r"expected attention, mlp or some of \['down_proj', 'gate_up_proj', 'o_proj', 'qkv"),
        (
            "qwen3_moe",
            ("attention", "mlp"),
            1,
            "names MLPs, and not the model's routed experts; add experts to --actor",
        ),
        ("llama", ("experts",), 1, r"targets names \['experts'\], expected attention, mlp or some of"),
        (
            "qwen3_moe",
            ("up_proj",),
            1,
            r"targets names \['up_proj'\], expected attention, mlp, experts or some of \['k_p",
        ),
        ("qwen3_5_text", ("q_proj",), 4, r"leaves stages \[0, 1, 2\] of pp=4 nothing to learn"),
    ],
)
def test_layers_without_adapters_are_refused(make_hf_model, family, targets, pp, message):
    config = MegatronConfig(ranks=pp, pp=pp, lora=LoraConfig(rank=4, targets=targets))
    with pytest.raises(ValueError, match=message):
        config.check_model(ModelSpec.from_folder(make_hf_model(family, False)))


def test_layers_of_a_tower_are_a_group_of_their_own(tmp_path):
    spec = ModelSpec.from_folder(make_vlm(tmp_path, "qwen2_5_vl"))

    def list_places(*targets: str) -> set[str]:
        adapters = LoraConfig(rank=4, targets=targets).list_adapters(spec)
        return {name.split(".")[3] for adapter in adapters for name in adapter.tensors}

    assert list_places("attention", "mlp") == {"language_model"} and list_places("vision", "projector") == {"visual"}
    assert list_places("gate_proj") == {"language_model", "visual"}, "PEFT takes both by such a name"
    with pytest.raises(ValueError, match="expected attention, mlp, vision, projector or some of"):
        MegatronConfig(lora=LoraConfig(rank=4, targets=("tower",))).check_model(spec)


@pytest.mark.parametrize("typed", ["--actor.lora.dropout 0.1", "--lora_dropout 0.1", "+a.model.lora.dropout=0.1"])
def test_a_dropout_is_refused_by_name(typed):
    done = run_program(lambda: parse_config(RunConfig()), *typed.split())
    name = typed.split()[0].split("=")[0]
    assert f"{name}: no option. Adapters have no dropout" in done.stdout + done.stderr


def test_the_command_line_sets_adapters():
    done = []
    run_program(lambda: done.append(parse_config(RunConfig())), "--actor.lora.rank", "8", "--actor.lora.alpha", "4")
    (config,) = done
    assert config.actor.lora == LoraConfig(rank=8, alpha=4.0)


def test_scales_are_those_of_both_papers():
    assert LoraConfig(rank=4, alpha=6.0).scale == 1.5
    assert LoraConfig(rank=9, alpha=6.0, scaling="rslora").scale == 2.0


def test_an_adapter_of_each_linear_layer_has_the_name_and_the_shape_that_peft_gives(make_hf_model):
    spec = ModelSpec.from_folder(make_hf_model("qwen3", False))
    first, *others = LoraConfig(rank=2, targets=("q_proj", "v_proj", "mlp")).list_adapters(spec)
    assert first.name == "decoder.layers.0.self_attention.linear_qkv.adapter" and len(others) == 3 * spec.layers - 1
    place = "base_model.model.model.layers.0.self_attn"
    assert first.tensors == {
        f"{place}.q_proj.lora_A.weight": (2, spec.hidden),
        f"{place}.v_proj.lora_A.weight": (2, spec.hidden),
        f"{place}.q_proj.lora_B.weight": (spec.heads * spec.head_dim, 2),
        f"{place}.v_proj.lora_B.weight": (spec.kv_heads * spec.head_dim, 2),
    }
    learning = sum(math.prod(shape) for adapter in (first, *others) for shape in adapter.tensors.values())
    assert learning < spec.count_weights() / 10


def change_config(**changes):
    """Return what changes some keys of a folder's config."""

    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: None, ""),
        (
            lambda folder: (folder / "adapter_config.json").unlink(),
            "has not both adapter_config.json and adapter_model",
        ),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"0" * 99), "is damaged"),
        (change_config(r=8), "has r 8, expected 2; change --actor.lora.rank"),
        (change_config(lora_alpha=1), "has lora_alpha 1, expected 32.0; change --actor.lora.alpha"),
        (change_config(use_rslora=True), "has use_rslora True, expected False; change --actor.lora.scaling"),
        (change_config(use_dora=True), "has use_dora True, which the engine does not compute; merge the adapters"),
        (change_config(init_lora_weights="gaussian"), ""),
        (
            change_config(init_lora_weights="pissa_niter_4"),
            "has init_lora_weights 'pissa_niter_4', which the engine does not compute",
        ),
        (change_config(init_lora_weights="lora_ga"), "has init_lora_weights 'lora_ga', which the engine does not"),
        (change_config(init_lora_weights="mica"), "has init_lora_weights 'mica', which the engine does not"),
        (change_config(init_lora_weights="of the year 2030"), "has init_lora_weights 'of the year 2030', which"),
        (change_config(init_lora_weights="orthogonal"), ""),
        (change_config(init_lora_weights=None), ""),
        (change_config(bias="all"), "has bias 'all', which the engine does not compute"),
        (change_config(modules_to_save=["lm_head"]), r"has modules_to_save \['lm_head'\], which"),
    ],
)
def test_a_folder_to_start_from_must_fit(make_hf_model, tmp_path, change, message):
    import torch

    spec, lora = ModelSpec.from_folder(make_hf_model("llama", True)), LoraConfig(rank=2, targets=("q_proj", "v_proj"))
    zeros = {n: torch.zeros(shape) for adapter in lora.list_adapters(spec) for n, shape in adapter.tensors.items()}
    save_adapter_folder(zeros.items(), lora.peft_settings, spec.folder, str(tmp_path / "adapter"))
    change(tmp_path / "adapter")
    starting = replace(lora, start=str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        MegatronConfig(lora=starting).check_model(spec)
    if not message:
        with pytest.raises(
            ValueError, match=r"has other adapters: missing .*o_proj.* \(16 in all\), unexpected \[\] \(0"
        ):
            MegatronConfig(lora=replace(starting, targets=("attention",))).check_model(spec)


def test_a_reference_without_a_model_of_its_own_is_the_actor():
    actor, kl = MegatronConfig(lora=LoraConfig(rank=2)), AlgorithmConfig(kl_coef=0.1)
    assert RunConfig(actor=actor, algorithm=kl).views_reference
    assert not RunConfig(algorithm=kl).views_reference
    assert not RunConfig(actor=actor, algorithm=AlgorithmConfig(kl_coef=0.1, reference="teacher")).views_reference
    for name in ("dedicated_devices", "cpu_offload"):
        with pytest.raises(ValueError, match=rf"{name}=\('reference',\) names the reference, which beside actor.lora"):
            RunConfig(actor=actor, algorithm=kl, placement=PlacementConfig(**{name: ("reference",)}))


def test_a_critic_of_the_actors_model_in_its_processes_shares_the_weights(make_hf_model):
    """They are counted once: a critic that shares them has adapters and a head, and one on other devices has a copy."""
    folder, lora = make_hf_model("qwen2", True), LoraConfig(rank=2)
    critic = CriticConfig(train=True)
    config = RunConfig(model=folder, actor=MegatronConfig(lora=lora), critic=critic)
    for shares, changes in (
        (True, {}),
        (True, {"critic": replace(critic, model=folder)}),
        (True, {"critic": CriticConfig(), "algorithm": AlgorithmConfig(name="ppo")}),
        (True, {"placement": PlacementConfig(colocate=True)}),
        (False, {"critic": replace(critic, model="another")}),
        (False, {"placement": PlacementConfig(dedicated_devices=("critic",))}),
        (False, {"actor": MegatronConfig()}),
        (False, {"critic": CriticConfig()}),
    ):
        assert replace(config, **changes).shares_base == shares, changes
    models = {"actor": ModelSpec.from_folder(folder), "critic": ModelSpec.from_folder(folder, head="value")}
    apart = replace(config, placement=PlacementConfig(dedicated_devices=("critic",)))
    shared, copied = (
        next(need.roles["critic"] for need in list_needs(each, models) if "critic" in need.roles)
        for each in (config, apart)
    )
    weights = [weight for weight in models["critic"].weights.values() if not weight.is_head]
    numbers = sum(math.prod(shape) for weight in weights for shape in weight.tensors.values())
    assert copied.parameters - shared.parameters == 4 * numbers
    assert replace(copied, parameters=shared.parameters) == shared
