"""Measure CPU-seconds of steps beside their forecast, fit the machine "cpu", and try the changes that a forecast names.

    python -m scripts.simulate.fit [--cases small medium ...] [--steps 6] [--json FILE]
    python -m scripts.simulate.fit --measured FILE

Each case is a run of the real engines. The first two fit the machine; the others, which differ in sizes, in shared
prompts, in TP2, PP2 and staleness 1, are forecast with what was fitted. CPU-seconds are medians over the steps but the
first, of the driver, the trainers and the rollout engine, by phase; Ray's own daemons are left out. ``--measured`` fits
and forecasts again from figures that are there.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from hardware.platforms import DEFAULT_PLATFORM
from scripts.bench.timing import make_parser, write_figures
from scripts.simulate.probes import probe_layer, probe_link, probe_products


@dataclass(frozen=True)
class Case:
    """A run: sizes of its model, of its step and of its trainers."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    vocab: int
    prompts: int
    samples: int
    prompt: int
    sampled: int
    actor: dict[str, Any] = field(default_factory=dict)
    staleness: int = 0


SMALL = Case(160, 480, 4, 5, 128, 32, 8, 6, 16)
MEDIUM = Case(384, 1024, 6, 6, 2048, 8, 8, 48, 24)
SIZES = Case(256, 768, 8, 4, 1024, 16, 8, 24, 32)
SLOW = replace(
    SIZES, prompts=4, prompt=96, sampled=16, actor={"share": "none", "recompute": "full", "micro_batch_tokens": 256}
)
CASES = {
    "small": SMALL,
    "medium": MEDIUM,
    "other sizes": SIZES,
    "prompts not shared": replace(MEDIUM, prompt=96, sampled=16, actor={"share": "none"}),
    "tp 2": replace(SIZES, actor={"ranks": 2, "tp": 2}),
    "pp 2": replace(SIZES, actor={"ranks": 2, "pp": 2, "micro_batch_tokens": 1024}),
    "staleness 1": replace(SIZES, prompts=32, sampled=16, staleness=1),
    "slow": SLOW,
    "slow, prompts shared": replace(SLOW, actor=SLOW.actor | {"share": "prompts"}),
    "slow, nothing recomputed": replace(SLOW, actor=SLOW.actor | {"recompute": "none"}),
    "slow, larger micro-batches": replace(SLOW, actor=SLOW.actor | {"micro_batch_tokens": 16384}),
}
FITTED = ("small", "medium")
ROLES = ("driver", "trainers", "rollout")

PARSER = make_parser(__doc__)
PARSER.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES], metavar="CASE")
PARSER.add_argument("--steps", type=int, default=6)
PARSER.add_argument("--measured", type=Path, metavar="FILE", help="figures of --json to fit and to forecast")
OPTIONS = PARSER.parse_args()
if OPTIONS.tiny:
    CASES = {name: replace(CASES[name], prompts=2, samples=2) for name in FITTED}
    OPTIONS.cases, OPTIONS.steps = [*CASES], 1


def make_inputs(folder: Path, case: Case) -> None:
    """Make a random Qwen2 and prompts of one length."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from recipes.common.addition import make_tokenizer

    tokenizer = make_tokenizer(further=tuple(f"<{i}>" for i in range(case.vocab - 99)))
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes = dict(hidden_size=case.hidden, intermediate_size=case.ffn, num_hidden_layers=case.layers)
    sizes |= dict(num_attention_heads=case.heads, num_key_value_heads=case.heads, vocab_size=case.vocab)
    config = Qwen2Config(
        **sizes, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    rows = ({"prompt": f"{i:0{case.prompt}d}", "answer": "0"} for i in range(1024))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_config(folder: Path, case: Case):
    """Make the settings of a case's run."""
    from engines.config import MegatronConfig, VllmConfig
    from rlworker.config.run import RunConfig
    from rlworker.config.sections import DataConfig

    sizes = dict(max_new_tokens=case.sampled, max_model_len=256, max_num_seqs=256, kv_cache_mb=256)
    return RunConfig(
        model=str(folder / "model"),
        run_dir=str(folder / "run"),
        data=DataConfig(str(folder / "train.jsonl"), max_prompt_tokens=case.prompt),
        actor=MegatronConfig(**{"micro_batch_tokens": 16384} | case.actor),
        rollout=VllmConfig(ignore_eos=True, staleness=case.staleness, **sizes),
        steps=1 + OPTIONS.steps + case.staleness,
        prompts_per_step=case.prompts,
        samples_per_prompt=case.samples,
    )


def reward(text: str, row) -> float:
    return len(set(text)) / 100


def measure(folder: Path, case: Case) -> dict[str, float]:
    """Run a case: median CPU-seconds of a step by role, and by role and phase; seconds of the clock."""
    import ray

    from rlworker.trainers.rl import Trainer

    pids: dict[str, list[int]] = {"driver": [os.getpid()]}

    def read() -> dict[str, float]:
        times = {role: [psutil.Process(pid).cpu_times() for pid in members] for role, members in pids.items()}
        return {role: sum(t.user + t.system for t in members) for role, members in times.items()}

    class Measured(Trainer):
        taken: dict[str, float]

        @contextmanager
        def _phase(self, clock, name: str) -> Iterator[None]:
            before, start = read(), time.perf_counter()
            with super()._phase(clock, name):
                yield
            if hasattr(self, "taken"):
                self.taken[f"clock {name}"] = time.perf_counter() - start
                self.taken |= {f"{role} {name}": now - before[role] for role, now in read().items()}

    steps = []
    with Measured(make_config(folder, case), reward) as trainer:
        for name, worker in trainer.name_workers().items():
            pid = ray.get(worker.__ray_call__.remote(lambda _: os.getpid()))
            pids.setdefault("rollout" if name.startswith("rollout") else "trainers", []).append(pid)
        for _ in range(1 + OPTIONS.steps):
            trainer.taken, before, start = {}, read(), time.perf_counter()
            trainer.step()
            seconds = {role: now - before[role] for role, now in read().items()}
            steps.append(seconds | trainer.taken | {"clock": time.perf_counter() - start})
    take = statistics.mean if case.staleness else statistics.median
    found = {name: take([step.get(name, 0.0) for step in steps[1:]]) for name in steps[-1]}
    return found | {"step": sum(found[role] for role in ROLES)}


def fit(rows: dict[str, dict[str, float]], folder: Path):
    """Fit the machine "cpu" to the probes and to the first two cases.

    A field of the update and two of the rollout are fitted to the two cases; what is left of each process's step is a
    constant.
    """
    from hardware.machines import MACHINES
    from rlworker.checks.plan.forecast import forecast_step

    machine = replace(
        MACHINES[DEFAULT_PLATFORM],
        products=dict.fromkeys(("float32", "bfloat16"), rows["probe"]["products"]),
        product_share=1.0,
        layer=rows["probe"]["layer"],
        call=rows["probe"]["call"],
        link=rows["probe"]["link"],
        network=rows["probe"]["link"],
    )
    runs = {name: make_run(folder, name) for name in FITTED}
    measured = [leave_waiting_out(rows[name]) for name in FITTED]

    def find(phases: tuple[str, ...], changes: dict[str, float]) -> list[float]:
        """Forecast phases of both cases."""
        steps = [forecast_step(*runs[name], replace(machine, **changes)) for name in FITTED]
        return [sum(step.phases[phase] for phase in phases) for step in steps]

    def solve(phases: tuple[str, ...], key: str, names: dict[str, tuple[float, float]]) -> None:
        """Fit fields of the machine by the least squares of relative errors.

        The phases' seconds are linear in each number, or in its inverse.

        Args:
            names: field of the machine -> its value where it costs nothing, and another.
        """
        nonlocal machine
        free = {name: nothing for name, (nothing, _) in names.items()}
        none = find(phases, free)
        columns = [
            [now - before for now, before in zip(find(phases, free | {name: unit}), none, strict=True)]
            for name, (_, unit) in names.items()
        ]
        targets = [row[key] - before for row, before in zip(measured, none, strict=True)]
        whole = np.array([row[key] for row in measured])
        values = np.linalg.lstsq((np.array(columns) / whole).T, np.array(targets) / whole)[0]
        found = {
            name: unit * value if nothing == 0 else unit / value
            for (name, (nothing, unit)), value in zip(names.items(), values.tolist(), strict=True)
        }
        print(f"{key}: {found}")
        machine = replace(machine, **found)

    solve(("update",), "trainers update", {"memory": (float("inf"), 1e9)})
    solve(("prefill", "decode"), "rollout rollout", {"engine_layer": (0.0, 1.0), "engine_token": (0.0, 1.0)})
    sizes = [4 * config_models[1]["actor"].count_weights() for config_models in runs.values()]
    sync = [(row["trainers sync"] + row["rollout sync"]) / 2 for row in measured]
    machine = replace(machine, host=(sizes[1] - sizes[0]) / (sync[1] - sync[0]))
    samples = [CASES[name].prompts * CASES[name].samples for name in FITTED]
    drivers = [row["driver"] for row in measured]
    sample = max(0.0, (drivers[1] - drivers[0]) / (samples[1] - samples[0]))
    rest = {
        role: statistics.mean(
            row[role] - row[f"{role} {phase}"] - size / machine.host for row, size in zip(measured, sizes, strict=True)
        )
        for role, phase in (("trainers", "update"), ("rollout", "rollout"))
    }
    return replace(
        machine,
        sample=sample,
        driver_step=statistics.mean(driver - sample * count for driver, count in zip(drivers, samples, strict=True)),
        trainer_step=rest["trainers"],
        rollout_step=rest["rollout"],
    )


def leave_waiting_out(row: dict[str, float]) -> dict[str, float]:
    """Leave out what threads that wait take, which grows with the clock of a loaded machine: at the rate at which a
    process takes it while another works."""
    waiting = {
        role: row[f"{role} {phase}"] * row["clock"] / row[f"clock {phase}"]
        for role, phase in (("trainers", "rollout"), ("rollout", "update"))
    }
    own = row | {role: row[role] - waiting.get(role, 0.0) for role in ROLES}
    for role, phase in (("trainers", "update"), ("rollout", "rollout")):
        own[f"{role} {phase}"] -= waiting[role] * row[f"clock {phase}"] / row["clock"]
    return own | {"step": sum(own[role] for role in ROLES)}


def make_run(folder: Path, name: str) -> tuple[Any, dict[str, Any]]:
    """Make the settings and the model of a case."""
    from engines.models.spec import ModelSpec

    own = folder / name
    if not own.is_dir():
        own.mkdir()
        make_inputs(own, CASES[name])
    config = make_config(own, CASES[name])
    return config, {"actor": ModelSpec.from_folder(config.model)}


def compare(rows: dict[str, dict[str, float]]) -> list[dict[str, str | float]]:
    """Fit the machine, and write each case's CPU-seconds beside those that are forecast."""
    from rlworker.checks.plan.forecast import forecast_step

    table = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        machine = fit(rows, folder)
        print(machine)
        for case, row in rows.items():
            if case == "probe":
                continue
            row = row if CASES[case].staleness else leave_waiting_out(row)
            found = forecast_step(*make_run(folder, case), machine)
            numbers = {"case": case, "CPU s": row["step"], "forecast": found.work, "ratio": found.work / row["step"]}
            numbers |= {f"{role} ratio": found.busy[role] / row[role] for role in ROLES}
            table.append(numbers)
            print(f"{case:28s}" + "  ".join(f"{key} {value:.3g}" for key, value in numbers.items() if key != "case"))
    return table


def main() -> None:
    if OPTIONS.measured:
        rows = json.loads(OPTIONS.measured.read_text())["rows"]
        compare({row["case"]: row for row in rows})
    else:
        os.environ["HF_HUB_OFFLINE"] = "1"
        call, link = probe_link()
        probed = {"products": probe_products(), "layer": probe_layer(), "call": call, "link": link}
        rows: list[dict[str, Any]] = [{"case": "probe"} | probed]
        print(probed, flush=True)
        from rlworker.cluster.ray import running_ray
        from rlworker.cluster.worker_pool import keeping_workers

        with running_ray(3, DEFAULT_PLATFORM), keeping_workers():
            for name in OPTIONS.cases:
                with tempfile.TemporaryDirectory() as folder:
                    make_inputs(Path(folder), CASES[name])
                    rows.append({"case": name} | measure(Path(folder), CASES[name]))
                print(f"{name:28s}" + "  ".join(f"{key} {rows[-1][key]:.3f}" for key in (*ROLES, "step")), flush=True)
                write_figures(OPTIONS.json, rows)
        if {*FITTED} <= {*OPTIONS.cases} and not OPTIONS.tiny:
            compare({row["case"]: row for row in rows})


if __name__ == "__main__":
    main()
