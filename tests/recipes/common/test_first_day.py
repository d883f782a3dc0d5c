"""The runs of a card's first day: their options are options of a run."""

import json
import sys
from unittest.mock import patch

import pytest

from hardware.platforms import get_platform
from recipes.common import first_day
from recipes.common.addition import make_data, make_model
from recipes.common.first_day import SIZES, Day, plan_runs
from recipes.grpo import DEFAULT
from rlworker.config.command_line import parse_config


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first_day")
    make_data(folder / "rows")
    make_model(folder / "model", seed=0)
    return ["--model", str(folder / "model"), "--data.train", str(folder / "rows" / "train.jsonl")]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("platform", ["cuda", "cuda-emulated"])
def test_its_runs_are_runs(platform, devices, named):
    """Each way of weights of the platform is one of them, as far as there are devices, or has a reason."""
    runs, not_run = plan_runs(get_platform(platform), devices)
    ways = {False: set(), True: set()}
    for options in runs.values():
        config = parse_config(DEFAULT, args=[*named, "--platform", platform, *SIZES, *options])
        ways[config.placement.colocate].add(config.rollout.weight_transfer)
    for colocated in (False, True):
        expected = set(get_platform(platform).find_weight_ways(colocated)) if colocated or devices > 1 else set()
        assert ways[colocated] - {"auto"} == expected
    assert not set(runs) & set(not_run) and all(not_run.values())


@pytest.fixture
def call(named, tmp_path, monkeypatch):
    """``call(*options, fails=())`` -> the names of the lines that this call ran, its exit status, and all outcomes."""

    def call(*options: str, fails=()):
        ran = []

        def run(day, name, *_):
            ran.append(name)
            day.add(name, name not in fails, "said", 1.0)

        steps = {
            "check_device": lambda day, _: run(day, "device check"),
            "check_model": run,
            "train": run,
            "train_shape": run,
        }
        arguments = ["first_day", "--platform", "cuda-emulated", "--folder", str(tmp_path), "--json"]
        monkeypatch.setattr(sys, "argv", [*arguments, str(tmp_path / "day.json"), "--model", named[1], *options])
        with patch.multiple(Day, **steps), pytest.raises(SystemExit) as ended:
            first_day.main()
        lines = json.loads((tmp_path / "day.json").read_text())["lines"] if (tmp_path / "day.json").exists() else []
        return ran, ended.value.code, [(line["name"], line["outcome"]) for line in lines]

    return call


def test_a_further_call_goes_on_behind_the_lines_that_are_there(call):
    checks = ["device check", "rlworker check"]
    assert call("--only", "check", fails=checks[1:]) == (
        checks,
        True,
        [("device check", "ok"), ("rlworker check", "FAILED")],
    )
    ran, failed, lines = call()
    assert ran and not set(ran) & set(checks) and failed, "a line that failed is kept, and counts"
    assert [name for name, _ in lines] == [*checks, *ran]
    ran, failed, lines = call("--retry")
    assert ran == ["rlworker check"] and not failed and lines[-1] == ("rlworker check", "ok")
    assert call()[0] == []


def test_no_line_begins_after_the_minutes_of_a_call(call, capsys):
    ran, failed, lines = call("--minutes", "0")
    assert not ran and not failed and not lines
    assert "left for another call, by --minutes: device check, rlworker check, grpo" in capsys.readouterr().out
    assert call("--only", "device check|rlworker check")[0] == ["device check", "rlworker check"]


def test_a_line_that_takes_too_long_is_ended_and_failed(tmp_path):
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('on'); time.sleep(60)"
    )
    done = first_day._run_within(0.02, [sys.executable, "-uc", code], {})
    assert done.returncode == 124 and done.stdout == "on\n" and "ended after 0.02 minutes" in done.stderr
