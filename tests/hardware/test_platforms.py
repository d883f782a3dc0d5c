"""The list of platforms: complete, loud about what one lacks, and one line longer by one platform."""

from pathlib import Path
from typing import get_args

import pytest
from support.new_platform import NAME, added_platform, write_platform

from engines.probes.faults import collect_faults
from hardware.attention.faults import ATTENTION_FAULTS
from hardware.platform import Node, Platform
from hardware.platforms import DEFAULT_PLATFORM, PLATFORMS, PlatformName, get_platform
from rlworker.checks.config import CheckConfig

ROOT = Path(__file__).parents[2]
MEMBERS = {*Platform.__annotations__, *(name for name in vars(Platform) if not name.startswith("_"))}


@pytest.mark.parametrize("name", PLATFORMS)
def test_every_platform_has_what_the_door_asks_for(name):
    platform = get_platform(name)
    assert {"name", "list_faults", "node", "build_attention_inputs"} < MEMBERS
    assert not (lacking := {member for member in MEMBERS if not hasattr(platform, member)}), lacking
    assert platform.name == name and platform.stand_in in PLATFORMS
    assert platform.node is None or isinstance(platform.node, Node)
    assert set(collect_faults(platform)) == set(ATTENTION_FAULTS)


def test_a_process_without_a_device_measures_all_its_memory():
    platform, size = get_platform(DEFAULT_PLATFORM), 2**27
    block = bytearray(size)
    before = platform.measure_peak_memory()
    block += bytes(size)
    after = platform.measure_peak_memory()
    assert before >= 2**24 and after >= 2 * size and after >= before


def test_settings_know_the_names_of_the_list():
    assert get_args(PlatformName) == tuple(PLATFORMS) and DEFAULT_PLATFORM in PLATFORMS


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda faults: faults.pop("padding seen"), r"'cpu' has no place for the planted faults \['padding seen'\]"),
        (lambda faults: faults.update({"inverted polarity": []}), r"no place for .* \['inverted polarity'\]"),
        (lambda faults: faults.update({"padding hidden": []}), r"has faults \['padding hidden'\] that nobody plants"),
    ],
)
def test_a_fault_without_a_place_is_refused_before_anything_starts(monkeypatch, tmp_path, change, said):
    """Who lacks one would pass a self-test that looks for nothing."""
    from rlworker.checks import self_test

    class Lacking(type(get_platform("cpu"))):
        def list_faults(self):
            faults = super().list_faults()
            change(faults)
            return faults

    def nothing_may_start(*_):
        raise AssertionError("Ray is started")

    monkeypatch.setattr(self_test, "get_platform", lambda name: Lacking())
    monkeypatch.setattr(self_test, "running_ray", nothing_may_start)
    with pytest.raises(ValueError, match=said):
        self_test.run_self_test(CheckConfig(), str(tmp_path), print)


def test_a_new_platform_is_there_for_as_long_as_it_is_added(tmp_path):
    with added_platform(write_platform(tmp_path)):
        platform = get_platform(NAME)
        assert (platform.name, type(platform).__module__) == (NAME, f"hardware.{NAME}.platform")
        owners = {
            getattr(owner, "__name__", "") for patches in collect_faults(platform).values() for owner, *_ in patches
        }
        assert owners == {"hardware.attention.grouped_sdpa", "torch.nn.functional"}
    with pytest.raises(ValueError, match=f"'{NAME}' is not available"):
        get_platform(NAME)
