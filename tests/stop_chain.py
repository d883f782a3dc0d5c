"""Runs that are asked to stop and started again by the same command line: they must end where an unbroken run ends.

    python tests/stop_chain.py --stops 10 --seed 1

Each link is a recipe in a program of its own, with a real Ray, trainers and vLLM, that gets a real signal: so many
seconds after its start, or so many milliseconds into a phase of a step.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from kill_chain import PHASES, RAY_AGENTS, check_folder, compare_ends, measure_survival

STOPPED = 128 + signal.SIGTERM
GONE_S = 5.0
"""Seconds that processes may outlive the program that started them."""
START_S = 12.0
"""Seconds that a start takes, roughly."""
MODEL = ["--model", "model", "--data.train", "data/train.jsonl", "--data.heldout", "data/few.jsonl"]
SIZES = ["--actor.ranks", "2", "--rollout.max-new-tokens", "4", "--rollout.max-model-len", "16"]
SIZES += ["--rollout.max-num-seqs", "64", "--rollout.kv-cache-mb", "64", "--data.max-prompt-tokens", "8"]
STEPS = ["--prompts-per-step", "8", "--samples-per-prompt", "4", "--checkpoint.save-every", "3", "--eval-every", "2"]
RATE = ["--actor.optimizer.lr", "3e-3", "--actor.optimizer.lr-scheduler", "linear"]


@dataclass(frozen=True)
class Moment:
    """When the signal comes: ``after`` seconds of the program, where no phase is named, or of the phase of a step."""

    after: float
    phase: str = ""
    step: int = 0


def reward(text, row) -> float:
    time.sleep(float(os.environ.get("SECONDS_PER_REWARD", 0)))
    return sum(c.isdigit() for c in text) / 4


def run_recipe(moment: Moment | None, pids: Path) -> None:
    from rlworker.config.command_line import parse_config
    from rlworker.config.run import RunConfig
    from rlworker.trainers.launch import launch
    from rlworker.trainers.run import Run

    phase_of = Run._phase

    def strike():
        children = psutil.Process().children(recursive=True)
        pids.write_text(json.dumps([p.pid for p in children if p.name() not in RAY_AGENTS]))
        os.kill(os.getpid(), signal.SIGTERM)

    @contextmanager
    def phase(self, clock, name):
        if moment and (name, self.steps_done + (name != "save")) == (moment.phase, moment.step):
            threading.Timer(moment.after, strike).start()
        with phase_of(self, clock, name):
            yield

    Run._phase = phase
    launch(parse_config(RunConfig()), reward)


def start(folder: Path, run: str, steps: int, moment: Moment | None = None) -> subprocess.Popen:
    settings = json.dumps(asdict(moment) if moment and moment.phase else None)
    options = [*MODEL, "--run-dir", run, "--steps", str(steps), "--resume", *SIZES, *STEPS, *RATE]
    root = str(Path(__file__).parent)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([root, str(Path(root).parent)])}
    command = [sys.executable, "-W", "ignore", __file__, "--recipe", settings, *options]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, **pipes)


def run_link(folder: Path, run: str, steps: int, moment: Moment | None = None) -> tuple[int, str]:
    link = start(folder, run, steps, moment)
    if moment and not moment.phase:
        time.sleep(moment.after)
        link.terminate()
    output = link.communicate(timeout=280)[0]
    return link.returncode, output


def check_stop(moment: Moment, status: int, output: str) -> None:
    """Check that the program ended as one that was asked to: it said so in a line and left no traceback."""
    assert status in (STOPPED, -signal.SIGTERM), f"{moment}: exit {status}\n{output[-3000:]}"
    assert "Traceback" not in output and "***" not in output, f"{moment}:\n{output[-3000:]}"
    if moment.phase:
        assert output.count("SIGTERM: finishing step") == 1 and "stopped after step" in output, output[-3000:]


def prepare(folder: Path) -> None:
    from recipes.common.addition import make_data, make_model

    make_data(folder / "data")
    lines = (folder / "data" / "heldout.jsonl").read_text().splitlines(keepends=True)
    (folder / "data" / "few.jsonl").write_text("".join(lines[:20]))
    make_model(folder / "model", seed=0)


def run_chain(folder: Path, moments: list[Moment], steps: int) -> None:
    """Run to the end once unbroken and once through every stop.

    Raises:
        AssertionError: a stop was not as it should be, something is corrupt, or the ends differ.
    """
    status, output = run_link(folder, "whole", steps)
    assert status == 0, output
    for moment in moments:
        start_s = time.monotonic()
        status, output = run_link(folder, "stopped", steps, moment)
        check_stop(moment, status, output)
        if (folder / "stopped" / "metrics.jsonl").exists():
            check_folder(folder / "stopped")
        if moment.phase:
            seconds = measure_survival(json.loads((folder / "pids").read_text()), time.time())
            assert seconds < GONE_S, f"{moment}: processes were left"
        lines = [line for line in output.splitlines() if "SIGTERM" in line or "stopped after" in line]
        print(moment, f"exit {status} after {time.monotonic() - start_s:.1f} s:", *lines, sep="\n  ", flush=True)
    status, output = run_link(folder, "stopped", steps)
    assert status == 0, output
    compare_ends(folder, steps, "whole", "stopped")


def draw_moments(count: int, seed: int, steps: int) -> list[Moment]:
    """Draw a third of them while the program starts, the others in phases of ascending steps."""
    generator = random.Random(seed)
    early = [Moment(generator.uniform(0.05, START_S)) for _ in range(count // 3)]
    late = []
    for i in range(count - len(early)):
        step = 1 + i * (steps - 1) // (count - len(early))
        phase = generator.choice([p for p in PHASES if p != "save" or step % 3 == 0])
        late.append(Moment(generator.uniform(0, PHASES[phase]) / 1000, phase, step))
    for moment in early:
        late.insert(generator.randrange(len(late) + 1), moment)
    return late


if __name__ == "__main__":
    if sys.argv[1] == "--recipe":
        settings = json.loads(sys.argv[2])
        del sys.argv[1:3]
        run_recipe(Moment(**settings) if settings else None, Path("pids"))
    else:
        options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
        count, seed = int(options.get("--stops", 10)), int(options.get("--seed", 0))
        with tempfile.TemporaryDirectory() as folder:
            prepare(Path(folder))
            run_chain(Path(folder), draw_moments(count, seed, count + 4), count + 4)
            print(f"{count} stops: metrics and weights are those of the unbroken run")
