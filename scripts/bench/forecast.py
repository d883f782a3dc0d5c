"""Measure CPU-seconds of steps beside their forecast, fit the machine "cpu", and try the changes that a forecast names.

    python scripts/bench/forecast.py [--cases small medium ...] [--steps 6] [--json FILE]
    python scripts/bench/forecast.py --measured FILE

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

import psutil
from timing import make_parser, write_figures


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
SLOW = replace(SIZES, prompt=96, sampled=16, actor={"share": "none", "recompute": "full", "micro_batch_tokens": 256})
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
            before = read()
            with super()._phase(clock, name):
                yield
            if hasattr(self, "taken"):
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


def probe_products() -> float:
    """Measure the FLOP/s of a product as wide as a layer, on one core."""
    import torch

    torch.set_num_threads(1)
    left, right, fastest = torch.randn(2048, 512), torch.randn(512, 1536), float("inf")
    for _ in range(20):
        start = time.process_time()
        left @ right
        fastest = min(fastest, time.process_time() - start)
    return 2 * 2048 * 512 * 1536 / fastest


def main() -> None:
    if OPTIONS.measured:
        rows = json.loads(OPTIONS.measured.read_text())["rows"]
    else:
        os.environ["HF_HUB_OFFLINE"] = "1"
        rows = [{"case": "probe", "products": probe_products()}]
        for name in OPTIONS.cases:
            with tempfile.TemporaryDirectory() as folder:
                make_inputs(Path(folder), CASES[name])
                rows.append({"case": name} | measure(Path(folder), CASES[name]))
            print(f"{name:28s}" + "  ".join(f"{key} {rows[-1][key]:.3f}" for key in (*ROLES, "step")), flush=True)
            write_figures(OPTIONS.json, rows)


if __name__ == "__main__":
    main()
