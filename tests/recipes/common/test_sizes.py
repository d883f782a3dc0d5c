"""What a recipe takes from its platform's machine, and that the command line wins over it."""

import sys
from dataclasses import replace

import pytest
from support.program import run_program

from engines.config import MegatronConfig, VllmConfig
from hardware.platform import Node
from hardware.platforms import PLATFORMS, get_platform
from recipes.common.sizes import fit_to_node
from recipes.common.smoke import RecipeConfig, SftRecipeConfig, parse_recipe_config
from rlworker import PlacementConfig

STATED = 32768
RECIPE = RecipeConfig(actor=MegatronConfig(ranks=8, tp=4), rollout=VllmConfig(kv_cache_mb=STATED), prompts_per_step=256)
SUPERVISED = SftRecipeConfig(actor=MegatronConfig(ranks=8, tp=4))


@pytest.mark.parametrize(
    ("devices", "device_gb", "ranks", "engines", "kv_cache_mb"),
    [
        (16, 64, 8, 8, 24576),  # a node of Ascend cards
        (8, 80, 4, 4, 32768),  # the cache that recipes state for devices of 80 GB
        (8, 141, 4, 4, 64000),
        (12, 80, 4, 8, 32768),  # half is six, of which a replica takes four
        (4, 80, 4, 4, 32768),  # two machines, since half of one does not hold a replica
        (8, 16, 4, 4, 0),  # no room that could be planned with: vLLM's own share
    ],
)
def test_half_of_a_node_trains(devices, device_gb, ranks, engines, kv_cache_mb):
    sized = fit_to_node(RECIPE, Node(devices, device_gb))
    assert (sized.actor.ranks, sized.rollout.engines, sized.rollout.kv_cache_mb) == (ranks, engines, kv_cache_mb)
    rollout = replace(RECIPE.rollout, engines=engines, kv_cache_mb=kv_cache_mb)
    assert sized == replace(RECIPE, actor=replace(RECIPE.actor, ranks=ranks), rollout=rollout), "and nothing else moves"


@pytest.mark.parametrize(
    ("sizes", "rollout_tp", "colocate", "ranks", "engines"),
    [
        ({"tp": 4, "ep": 8}, 2, True, 16, 8),  # all of them train, then sample
        ({"tp": 4, "ep": 8}, 2, False, 8, 4),
        ({"tp": 2, "pp": 3}, 4, False, 6, 2),  # of ten that are left an engine takes four
        ({"tp": 4, "ep": 16}, 1, False, 16, 16),  # two machines, since half of one does not hold the experts once
        ({"tp": 1, "pp": 2, "ep": 2, "etp": 2}, 1, True, 16, 16),
    ],
)
def test_a_replica_has_its_experts_and_an_engine_its_devices(sizes, rollout_tp, colocate, ranks, engines):
    actor, rollout = MegatronConfig(ranks=48, **sizes), VllmConfig(tp=rollout_tp, kv_cache_mb=STATED)
    recipe = RecipeConfig(actor=actor, rollout=rollout, placement=PlacementConfig(colocate=colocate))
    sized = fit_to_node(recipe, Node(16, 80))
    assert (sized.actor.ranks, sized.rollout.engines, sized.rollout.kv_cache_mb) == (ranks, engines, STATED)


@pytest.mark.parametrize(("devices", "ranks"), [(16, 16), (8, 8), (6, 4), (3, 4)])
def test_without_a_rollout_all_of_it_trains(devices, ranks):
    sized = fit_to_node(SUPERVISED, Node(devices, 64))
    assert sized == replace(SUPERVISED, actor=replace(SUPERVISED.actor, ranks=ranks))


def test_where_no_machine_is_known_a_recipe_keeps_its_sizes():
    assert fit_to_node(RECIPE, None) == RECIPE
    for name in PLATFORMS:
        sized, platform = RECIPE.move_to_platform(name), get_platform(name)
        engines = {
            "actor": replace(RECIPE.actor, dtype=platform.default_dtype),
            "rollout": replace(RECIPE.rollout, dtype=platform.default_dtype),
        }
        assert sized == fit_to_node(replace(RECIPE, platform=name, **engines), platform.node)
        assert platform.node or sized == replace(RECIPE, platform=name)


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ((), ("cpu", 8, 1, STATED)),
        (("--platform", "npu"), ("npu", 8, 8, 24576)),
        (("--platform=npu", "--rollout.engines", "3"), ("npu", 8, 3, 24576)),
        (("--actor.ranks=4", "--rollout.kv-cache-mb", "512", "--platform", "npu"), ("npu", 4, 8, 512)),
        (("--rollout.engines", "1", "--platform", "npu"), ("npu", 8, 1, 24576)),  # what the recipe itself says, given
        (("--platform", "npu-emulated"), ("npu-emulated", 8, 1, STATED)),
    ],
)
def test_a_key_that_is_given_wins(monkeypatch, arguments, want):
    monkeypatch.setattr(sys, "argv", ["recipe", *arguments])
    config = parse_recipe_config(RECIPE, "")
    assert (config.platform, config.actor.ranks, config.rollout.engines, config.rollout.kv_cache_mb) == want


def test_a_recipe_that_states_a_platform_states_its_sizes_for_it(monkeypatch):
    own = replace(RECIPE, platform="npu")
    monkeypatch.setattr(sys, "argv", ["recipe", "--platform", "npu"])
    assert parse_recipe_config(own, "") == own


@pytest.mark.parametrize("arguments", [("--platform", "tpu"), ("--platform",)])
def test_what_is_wrong_with_a_platform_is_said_with_its_choices(arguments):
    done = run_program(lambda: parse_recipe_config(RECIPE, ""), *arguments)
    assert done.returncode == 2 and "--platform" in done.stdout + done.stderr
    assert arguments == ("--platform",) or all(name in done.stdout + done.stderr for name in PLATFORMS)
