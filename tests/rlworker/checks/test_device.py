"""``scripts/device_check.py``: what it needs, what it finds, and what it says where a device is not as stated."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.cover import in_runs
from support.ranks.engines_cases import leave_groups, start_process
from support.suite.imports import ROOT, files_of, imported

from hardware.attention.contract import KernelContract, RefusedError, Requirement, SilentError, Source
from hardware.cuda.emulated import EmulatedCudaPlatform
from hardware.platforms import get_platform
from rlworker.base.findings import format_table
from rlworker.checks.device import attention, contract
from rlworker.checks.device.report import Device, build_report

SCRIPT = ROOT / "scripts" / "device_check.py"
PARTS = ["attention", "engine", "memory", "reads", "speed", "contract"]
ABSENT = ("ray", "vllm", "tyro", "pytest", "pydantic", "datasets", "accelerate", "xxhash")
BLOCKED = f"""
import runpy, sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {ABSENT} else super().find_spec(name, path, target)
sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
sys.argv = {[str(SCRIPT)]} + sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def load_script():
    spec = importlib.util.spec_from_file_location("device_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_modules_import_neither_ray_nor_tyro():
    """Followed through this project's own modules, with what the functions of a device check import."""
    checked = [SCRIPT, *(ROOT / "rlworker" / "checks" / "device").glob("*.py")]
    seen, foreign = [*checked], set()
    for path in seen:  # it grows as it is read
        for name in imported(path, on_load=path not in checked):
            own = files_of(name)
            seen += [file for file in own if file not in seen]
            foreign |= set() if own else {name.split(".")[0]}
    assert len(seen) > 25 and "torch" in foreign
    assert not foreign & set(ABSENT)


def run_parts(rank, world, name, parts, folder):
    leave_groups()
    device = Device(start_process(rank, name), torch.device("cpu"))
    try:
        findings = load_script().run_parts(device, parts, Path(folder))
    finally:
        leave_groups()
    return build_report(device, findings)


@pytest.mark.parametrize("platform", in_runs(default=["npu-emulated"], large=["cuda-emulated"]))
def test_an_emulator_is_as_stated(one_rank, tmp_path, platform):
    report = one_rank.run(run_parts, platform, ["reads", "memory", "contract"], str(tmp_path))[0]
    assert report["passed"], [line for line in report["findings"] if line["outcome"] == "FAILED"]
    counts = {part: sum(line["check"] == part for line in report["findings"]) for part in ("reads", "contract")}
    assert counts == {"reads": 8, "contract": {"cuda-emulated": 17, "npu-emulated": 28}[platform]}
    assert {line["evidence"] for line in report["findings"]} == {"emulated"}
    assert report["platform"].startswith(f"{platform} (emulated)")
    assert report["versions"]["torch"] == version("torch")


def test_a_model_is_refused_where_there_is_none(tmp_path):
    made = subprocess.run([sys.executable, SCRIPT, "--platform", "cuda", "--model", tmp_path], capture_output=True)
    assert made.returncode == 2 and b"there is no config.json in it, expected a HuggingFace folder" in made.stderr


@dataclass(frozen=True)
class Real(Device):
    """A device that is not emulated, as the contract sees it."""

    is_host = False

    def synchronize(self):
        pass


def raise_error(kind):
    raise kind("no")


@pytest.mark.parametrize(
    ("silent", "refuses", "broken", "emulated", "passed"),
    [
        (False, True, RefusedError, True, True),
        (False, True, SilentError, True, False),
        (True, False, SilentError, True, True),
        (True, False, None, True, False),
        (False, True, None, True, False),
        (False, True, RuntimeError, False, True),
        (False, True, None, False, False),
        (True, False, None, False, True),
        (True, False, RuntimeError, False, False),
        (False, False, None, False, True),
        (False, False, RuntimeError, False, True),
    ],
)
def test_a_kernel_is_held_to_what_is_stated(monkeypatch, silent, refuses, broken, emulated, passed):
    """What raises where it is to be silent fails as what computes where it is to refuse."""
    requirement = Requirement("one", Source("page", refuses), lambda call: True, lambda call: "", silent)
    calls = {"one": ({"kind": broken}, {"kind": None})}
    attend = lambda kind: raise_error(kind) if kind else None  # noqa: E731
    kernel = KernelContract((requirement,), calls, attend)
    monkeypatch.setattr(EmulatedCudaPlatform, "build_contract", lambda self, device: kernel)
    device = (Device if emulated else Real)(get_platform("cuda-emulated"), torch.device("cpu"))
    (line,) = contract.check_contract(device)
    assert line.outcome == ("ok" if passed else "FAILED"), line
    calls["one"] = calls["one"][0], {"kind": ValueError}
    (line,) = contract.check_contract(device)
    assert line.outcome == "FAILED" and "kept: ValueError" in line.text


def test_a_part_that_raises_is_a_line_that_failed(monkeypatch, capsys):
    from rlworker.checks.device import engine

    monkeypatch.setattr(attention, "check_attention", lambda device: 1 / 0)
    monkeypatch.setattr(engine, "joined_process", lambda device: torch.no_grad())
    device = Device(get_platform("cuda-emulated"), torch.device("cpu"))
    findings = load_script().run_parts(device, ["attention"], Path())
    assert not build_report(device, findings)["passed"]
    assert "attention         FAILED   emulated  raised ZeroDivisionError" in capsys.readouterr().out
    line = device.make_finding("speed", "a", True, "1 TFLOP/s", {"TFLOP/s": 1.0})
    assert format_table([line]).splitlines()[1] == "speed  a      ok       emulated  1 TFLOP/s"


@pytest.mark.parametrize(
    ("arguments", "missing", "said"),
    [
        (
            ["--platform", "cuda"],
            [],
            f"'cuda' {'did not start' if torch.version.cuda else 'needs a torch that was built'}",
        ),
        (["--platform", "npu"], [], "'npu' needs torch_npu and CANN"),
        (["--platform", "cpu"], ["megatron-core"], "not installed: megatron-core; pip install megatron-core"),
        (["--platform", "cpu", "--only", "masks"], [], "there is no part masks, expected some of attention"),
    ],
)
def test_what_is_not_there_is_said_before_anything_is_built(monkeypatch, capsys, arguments, missing, said):
    script = load_script()
    monkeypatch.setattr(script, "find_missing_packages", lambda: missing)
    monkeypatch.setattr(script, "os", SimpleNamespace(environ=dict(os.environ)))
    monkeypatch.setattr(sys, "argv", ["device_check.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("platform", "parts"),
    in_runs(
        large=[("npu-emulated", ["attention", "memory", "contract"])],
        product=[("cuda-emulated", PARTS), ("npu-emulated", PARTS)],
    ),
)
def test_it_runs_where_ray_vllm_and_tyro_are_not(tmp_path, measured, platform, parts):
    report = tmp_path / "report.json"
    options = ["--platform", platform, "--only", ",".join(parts), "--json", str(report)]
    command = [sys.executable, "-W", "ignore", "-c", BLOCKED, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = json.loads(report.read_text())["findings"]
    assert {line["evidence"] for line in lines} <= {"emulated", "table", "untested"}
    assert {line["check"].split()[0] for line in lines} == {*parts}
    measured({"lines": len(lines)})
