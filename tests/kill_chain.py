"""Runs that are killed and resumed: a chain of them must end where a run that nobody killed ends.

    python tests/kill_chain.py --kills 24 --seed 1
    python tests/kill_chain.py --kills 24 --model experts       # shared out over the ranks, their choice replayed
    python tests/kill_chain.py --kills 24 --model states        # a layer with a state, one of attention
    python tests/kill_chain.py --kills 10 --calculator runs/calculator    # of a run of that demo, for its warm model
    python tests/kill_chain.py --kills 24 --calculator runs/calculator --staleness 1

Each link of the chain is a program of its own with a real Ray, trainers and vLLM. It is told whom to kill (the driver,
a trainer rank, the rollout engine or an environment worker), in which step and phase, and how many milliseconds in.
The calculator's tools take a random time. There only the driver's end ends a program: all others are replaced. Where
rollouts run ahead no two runs are equal, and tools are the demo's own: then every step must have learned from the same
prompts, each of them once.
"""

import base64
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from safetensors import safe_open

from engines.config import MegatronConfig, OptimizerConfig, VllmConfig
from engines.models.spec import ModelSpec
from rlworker.config.run import RunConfig
from rlworker.config.sections import CheckpointConfig, DataConfig, RecoveryConfig
from rlworker.config.validation import ValidationConfig

VICTIMS = ("driver", "actor rank 0", "actor rank 1", "rollout engine 0")
PHASES = {"rollout": 60, "update": 40, "sync": 30, "canary": 20, "save": 150}
"""Phase -> its length in milliseconds, roughly."""
CHAIN_PHASES = PHASES | {"evaluate": 150}
EPISODE_VICTIMS = ("driver", "environment worker 0", "environment worker 1", "rollout engine 0")
EPISODE_PHASES = {"rollout": 600, "update": 60, "sync": 30}
AHEAD_VICTIMS = (*EPISODE_VICTIMS, "actor rank 0", "actor rank 1")
AHEAD_PROMPTS, HELDOUT_ROWS = 32, 32
HELDOUT_LIMIT = 0.05
"""Between the run that nobody killed and the killed one, where rollouts run ahead."""
SURVIVORS_END_S = 60
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""They hold no part of a run. Where Ray was killed with its driver they try for a minute to report it, then end."""


@dataclass(frozen=True)
class Kill:
    victim: str
    step: int
    phase: str
    delay_ms: float


def make_config(folder: Path, run: str, steps: int) -> RunConfig:
    """Make the settings of a small run. Experts of its model are shared out over both ranks, and replayed."""
    model = str(folder / "model")
    has_experts = ModelSpec.from_folder(model).experts is not None
    return RunConfig(
        model=model,
        run_dir=str(folder / run),
        data=DataConfig(str(folder / "data" / "train.jsonl"), max_prompt_tokens=8),
        actor=MegatronConfig(ranks=2, ep=1 + has_experts, optimizer=OptimizerConfig(lr=3e-3)),
        rollout=VllmConfig(
            max_new_tokens=4, max_model_len=16, max_num_seqs=64, kv_cache_mb=64, replay_routes=has_experts
        ),
        steps=steps,
        prompts_per_step=8,
        samples_per_prompt=4,
        checkpoint=CheckpointConfig(save_every=2),
    )


def add_validation(config: RunConfig, folder: Path) -> RunConfig:
    """Let a run validate after every step, on two sets and with samples."""
    rows, few = (folder / "data" / f"{name}.jsonl" for name in ("heldout", "few"))
    few.write_text("".join(rows.read_text().splitlines(keepends=True)[:HELDOUT_ROWS]))
    data = replace(config.data, heldout=str(few), heldout_sets={"again": str(few)})
    sampled = ValidationConfig(samples=4, temperature=0.7)
    environment = replace(config.environment, pass_reward=0.25)
    return replace(config, data=data, eval_every=1, validation=sampled, environment=environment)


def reward(text, row) -> float:
    return sum(c.isdigit() for c in text) / 4


def make_episode_config(folder: Path, run: str, steps: int, toy: str, staleness: int = 0) -> RunConfig:
    """Make the settings of a run of the calculator that goes on without whoever is killed, but for the driver. Where
    rollouts run ahead it is evaluated."""
    from recipes.demos import calculator

    config, heldout = calculator.DEFAULT, f"{toy}/data/heldout.jsonl" * bool(staleness)
    return replace(
        config,
        model=f"{toy}/model_warm_seed0",
        run_dir=str(folder / run),
        data=replace(config.data, train=f"{toy}/data/train.jsonl", heldout=heldout),
        rollout=replace(config.rollout, staleness=staleness),
        environment=replace(config.environment, workers=2),
        steps=steps,
        prompts_per_step=AHEAD_PROMPTS if staleness else 16,
        eval_every=0,
        checkpoint=CheckpointConfig(save_every=2),
        recovery=RecoveryConfig(restarts=100),
    )


def compute_slowly(expression: str) -> str:
    """Compute as the calculator does, in a time that nobody can repeat. Its process is new and should import little."""
    time.sleep(random.SystemRandom().uniform(0, 0.05))
    found = re.fullmatch(r"(\d{1,5})([*+])(\d{1,5})", expression)
    if not found:
        return "?"
    return str(int(found[1]) * int(found[3]) if found[2] == "*" else int(found[1]) + int(found[3]))


def make_environment(own_tools: bool) -> Callable:
    """Make the calculator's environment: the demo's own, or one with a tool in a process of its own."""
    from recipes.demos.calculator import TOOL, TURNS, ask_calculator

    if own_tools:
        return ask_calculator

    async def environment(policy, row):
        from rlworker import Episode, answer_calls

        episode = Episode(row, tools=[TOOL], tool_parser="hermes")
        for _ in range(TURNS):
            sample = await policy.sample(episode)
            if not (answers := await answer_calls(policy, sample, {"calculate": compute_slowly})):
                episode.reward(float(sample.text == row.answer))
                break
            episode.observe(answers)
        return episode

    return environment


def run_link(config: RunConfig, kills: list[Kill], pids: Path, learn_from: Callable = reward) -> None:
    import ray

    from rlworker.trainers.rl import Trainer

    class Killed(Trainer):
        def start(self):
            super().start()
            children = [p.pid for p in psutil.Process().children(recursive=True) if p.name() not in RAY_AGENTS]
            pids.write_text(json.dumps(children))

        def find_pid(self, victim):
            if victim == "driver":
                return os.getpid()
            return ray.get(self.name_workers()[victim].__ray_call__.remote(lambda _: os.getpid()))

        @contextmanager
        def _phase(self, clock, name):
            done = self.steps_done if name in ("evaluate", "save") else self.steps_done + 1
            if kills and self.has_begun and (name, done) == (kills[0].phase, kills[0].step):
                kill = kills.pop(0)
                threading.Timer(kill.delay_ms / 1000, strike, [self.find_pid(kill.victim)]).start()
            with super()._phase(clock, name):
                yield

    def strike(pid):
        pids.with_name("struck").write_text(str(time.time()))
        os.kill(pid, signal.SIGKILL)

    with Killed(config, learn_from) as trainer:
        trainer.fit()


def start_link(config: RunConfig, kills: list[Kill], pids: Path, toy: bool = False) -> tuple[int, str]:
    link = base64.b64encode(pickle.dumps((config, kills, pids, toy))).decode()
    command, env = [sys.executable, "-W", "ignore", __file__, "--link", link], os.environ | {"PYTHONPATH": os.getcwd()}
    process = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
    return process.returncode, process.stdout + process.stderr


def measure_survival(pids: list[int], since: float) -> float:
    """Return the seconds after ``since`` (wall clock) until the last of these processes has ended."""
    while time.time() - since < SURVIVORS_END_S and any(_is_alive(p) for p in pids):
        time.sleep(0.1)
    return time.time() - since


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def check_folder(run: Path) -> None:
    """Check that everything that a killed run left can be read; the last line of its metrics may be cut short."""
    json.loads((run / "config.json").read_text())
    for line in (run / "metrics.jsonl").read_text().split("\n")[:-1]:
        json.loads(line)
    for checkpoint in (run / "checkpoints").glob("step_*"):
        assert json.loads((checkpoint / "trainer.json").read_text())["step"] == int(checkpoint.name[5:])
        read_weights(checkpoint)


def read_weights(checkpoint: Path) -> dict:
    tensors = {}
    for path in (checkpoint / "hf").glob("*.safetensors"):
        with safe_open(path, "np") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert tensors, f"{checkpoint} has no weights"
    return tensors


def read_metrics_without_times(run: Path) -> list[dict]:
    """Return the lines of a run's metrics without what depends on the machine's speed, and without its outages."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    varying = ("tokens_per_second", "flops_per_second", "memory_gb", "rollout_memory_gb", "restarts")
    return [{k: v for k, v in x.items() if not k.startswith("time") and k not in varying} for x in lines]


def check_kill(kill: Kill, output: str, code: int) -> None:
    """Check that the program ended, and named the worker that was killed, the phase and the step."""
    assert code != 0, "the run went on without its victim"
    if kill.victim != "driver":
        match = re.search(r"step (\d+), phase (\w+): (.*) died", output)
        assert match, output[-3000:]
        assert kill.victim in match[3], f"{kill}: blamed {match[3]}"
        # A kill that comes late in a phase is met in the next one.
        assert int(match[1]) in (kill.step, kill.step + 1), f"{kill}: {match[0]}"


def run_chain(folder: Path, kills: list[Kill], steps: int) -> dict[str, float]:
    """Run to the end once unkilled and once through every kill. Returns the longest time that survivors took to end.

    Raises:
        AssertionError: something was corrupt, survived too long, went unnamed, or the ends differ.
    """
    whole_config, killed_config = (
        add_validation(make_config(folder, run, steps), folder) for run in ("whole", "killed")
    )
    code, output = start_link(whole_config, [], folder / "pids")
    assert code == 0, output
    longest = 0.0
    for kill in kills:
        resume = (folder / "killed" / "config.json").exists()
        code, output = start_link(replace(killed_config, resume=resume), [kill], folder / "pids")
        check_kill(kill, output, code)
        seconds = measure_survival(json.loads((folder / "pids").read_text()), float((folder / "struck").read_text()))
        longest = max(longest, seconds)
        assert seconds < SURVIVORS_END_S, f"{kill}: processes were left"
        check_folder(folder / "killed")
        print(kill, f"exit {code}, all gone after {seconds:.1f} s", flush=True)
    code, output = start_link(replace(killed_config, resume=True), [], folder / "pids")
    assert code == 0, output
    compare_ends(folder, steps, "whole", "killed")
    return {"kills": len(kills), "longest_seconds": longest}


def compare_ends(folder: Path, steps: int, *runs: str) -> None:
    """Check that two runs, one that was whole and the other, have the same metrics and weights, bit for bit."""
    whole, other = (read_metrics_without_times(folder / run) for run in runs)
    assert whole == other
    tables = [path.read_text() for run in runs if (path := folder / run / "validation.jsonl").exists()]
    assert len({*tables}) <= 1 and len(tables) in (0, len(runs))
    ends = [read_weights(folder / run / "checkpoints" / f"step_{steps}") for run in runs]
    assert ends[0].keys() == ends[1].keys() and all((ends[0][n] == ends[1][n]).all() for n in ends[0])


def compare_prompts(folder: Path, steps: int) -> None:
    """Check that both runs learned from the same prompts in each step, each once, and how much they learned."""
    whole, killed = (
        [json.loads(line) for line in (folder / run / "prompts.jsonl").read_text().splitlines()]
        for run in ("whole", "killed")
    )
    assert whole == killed and [line["step"] for line in whole] == list(range(1, steps + 1))
    assert [line["first_rollout"] for line in whole] == list(range(steps))
    rows = [row for line in whole for row in line["rows"]]
    assert len(rows) == len(set(rows)) == steps * AHEAD_PROMPTS, "of less than an epoch no row comes twice"
    ends = [read_metrics_without_times(folder / run)[-1]["heldout"] for run in ("whole", "killed")]
    print("held-out", ends, flush=True)
    assert abs(ends[0] - ends[1]) <= HELDOUT_LIMIT


def run_episode_chain(folder: Path, kills: list[Kill], steps: int, toy: str, staleness: int = 0) -> None:
    """Run to the end twice unkilled and once through every kill.

    Raises:
        AssertionError: somebody was not killed, or the ends differ.
    """
    for run in ("whole",) if staleness else ("again", "whole"):
        code, output = start_link(make_episode_config(folder, run, steps, toy, staleness), [], folder / "pids", True)
        assert code == 0, output
    if not staleness:
        assert read_metrics_without_times(folder / "again") == read_metrics_without_times(folder / "whole")
    config, left = make_episode_config(folder, "killed", steps, toy, staleness), list(kills)
    while True:
        resume = (folder / "killed" / "config.json").exists()
        code, output = start_link(replace(config, resume=resume), left, folder / "pids", True)
        drivers = [place for place, kill in enumerate(left) if kill.victim == "driver"]
        assert (code == 0) == (not drivers), output
        print(left[: drivers[0] + 1] if drivers else left, f"exit {code}", flush=True)
        if not drivers:
            break
        left = left[drivers[0] + 1 :]
    compare_prompts(folder, steps) if staleness else compare_ends(folder, steps, "whole", "killed")
    outages = (folder / "killed" / "outages.jsonl").read_text().splitlines()
    assert len(outages) == sum(kill.victim != "driver" for kill in kills), outages
    print(read_metrics_without_times(folder / "killed")[-1])


def draw_kills(
    count: int, seed: int, steps: int, victims: tuple[str, ...] = VICTIMS, phases: dict[str, int] = PHASES
) -> list[Kill]:
    """Draw kills in ascending steps, so that every link of the chain gets as far as its own."""
    generator = random.Random(seed)
    kills = []
    for i in range(count):
        step = 1 + i * (steps - 1) // count
        phase = generator.choice([p for p in phases if p != "save" or step % 2 == 0])
        kills.append(Kill(generator.choice(victims), step, phase, generator.uniform(0, phases[phase])))
    return kills


if __name__ == "__main__":
    if sys.argv[1] == "--link":
        config, kills, pids, toy = pickle.loads(base64.b64decode(sys.argv[2]))
        run_link(config, kills, pids, make_environment(own_tools=config.rollout.staleness > 0) if toy else reward)
    else:
        import tempfile

        from recipes.common.addition import make_data, make_expert_model, make_model, make_state_model

        options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
        count, seed = int(options.get("--kills", 24)), int(options.get("--seed", 0))
        steps = count + 2
        with tempfile.TemporaryDirectory() as folder:
            if toy := options.get("--calculator"):
                staleness = int(options.get("--staleness", 0))
                victims = AHEAD_VICTIMS if staleness else EPISODE_VICTIMS
                kills = draw_kills(count, seed, steps, victims, EPISODE_PHASES)
                run_episode_chain(Path(folder), kills, steps, str(Path(toy).resolve()), staleness)
                sys.exit()
            make_data(Path(folder) / "data")
            kinds = {"experts": make_expert_model, "states": make_state_model}
            kinds.get(options.get("--model", ""), make_model)(Path(folder) / "model", seed=0)
            print(run_chain(Path(folder), draw_kills(count, seed, steps, phases=CHAIN_PHASES), steps))
