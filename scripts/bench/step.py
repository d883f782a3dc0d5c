"""Measure what a GRPO step costs on the real engines, against a single process that does the same work.

    python scripts/bench/step.py [--ranks 1] [--rollouts 1] [--staleness 0] [--steps 12] [--tiny] [--json FILE]
    python scripts/bench/step.py --written [--prompts 256] [--steps 12] [--tiny] [--json FILE]
    python scripts/bench/step.py --stub-trainer [--steps 12] [--tiny] [--json FILE]
    python scripts/bench/step.py --model FOLDER --prompts 8 [--share auto none] [--trl PYTHON] [--json FILE]

Work: a Qwen2 of 1.4 million parameters, 32 prompts x 8 samples, 16 new tokens, one update. Measured from the second
step on, medians: wall seconds by phase, and CPU seconds of the driver, the trainers and the rollout engine (Ray's own
daemons apart). The comparison generates with transformers and updates with plain torch, in one process and in this
run, so that the ratio means something on a machine of any speed. With a staleness, steps whose rollouts run ahead are
measured beside those that take turns: means there, since one step waits and the next does not. With ``--written``,
steps of an environment that samples once and gives the same reward are measured beside the others, and nothing else.

With a stub trainer an update is a sleep as long as a rollout takes, and samples have log-normal lengths of 16 to 512
tokens. Weights are synced as ever. Steps a second at staleness 0, 1 and 2, in one run.

With ``--model`` a HuggingFace model answers sums that its chat template wraps, once for each way to share prompts. TRL
does the same work beside it, in an environment of its own, in one process of one thread.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from timing import make_parser, write_figures


def find_trl(python: str) -> str:
    """Check that a Python's environment has TRL; argparse.ArgumentTypeError where it has not."""
    try:
        command = [python, "-c", "import datasets, trl; trl.GRPOTrainer"]
        subprocess.run(command, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).splitlines()[-1]
        advice = "python -m venv ENV, ENV/bin/pip install trl datasets requests, and give ENV/bin/python"
        raise argparse.ArgumentTypeError(f"{python!r} has no TRL that can be imported ({reason}); {advice}") from None
    return python


PARSER = make_parser(__doc__)
for _name, _default in (("ranks", 1), ("rollouts", 1), ("steps", 12), ("staleness", 0), ("prompts", 32)):
    PARSER.add_argument(f"--{_name}", type=int, default=_default)
PARSER.add_argument("--written", action="store_true", help="measure an environment of one turn beside its reward")
PARSER.add_argument("--stub-trainer", action="store_true", help="measure rollouts that run ahead of a sleep")
PARSER.add_argument("--model", type=Path, metavar="FOLDER", help="measure steps of this model instead")
PARSER.add_argument("--share", nargs="+", default=["auto"], choices=["auto", "none", "prompts", "tree"])
PARSER.add_argument("--trl", type=find_trl, metavar="PYTHON", help="that of an environment with TRL, beside --model")
OPTIONS = PARSER.parse_args()
if OPTIONS.trl and not OPTIONS.model:
    PARSER.error("--trl is measured on the model of --model FOLDER; give that too")
SIZES = dict(hidden_size=160, intermediate_size=480, num_hidden_layers=4, num_attention_heads=5)
PROMPTS, SAMPLES = (2, 2) if OPTIONS.tiny else (OPTIONS.prompts, 8)
NEW_TOKENS, PROMPT_TOKENS, BUDGET, RATE = (16, 128, 4096, 1e-5) if OPTIONS.model else (16, 6, 16384, 1e-4)
SHORTEST, LONGEST, MEDIAN, SIGMA = (2, 8, 4, 0.8) if OPTIONS.tiny else (16, 512, 80, 0.9)
"""Tokens of a sample beside a stub trainer."""


def make_inputs(folder: Path) -> None:
    """Make a random model that knows characters, and two-digit additions as prompts; the latter for a given model."""
    if OPTIONS.model:
        pairs = [(10 + i % 89, 10 + i * 37 % 83) for i in range(1024)]
        texts = [f"What is {a} + {b}? Answer with the number alone." for a, b in pairs]
        rows = [
            {"prompt": [{"role": "user", "content": text}], "answer": str(a + b)}
            for text, (a, b) in zip(texts, pairs, strict=True)
        ]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from recipes.common.addition import make_data, make_tokenizer

    torch.manual_seed(0)
    config = Qwen2Config(
        **SIZES,
        vocab_size=128,
        num_key_value_heads=5,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    print(f"model: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} million parameters")
    model.save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    make_data(folder)


def reward(text: str, row) -> float:
    return len(set(text)) / NEW_TOKENS


def sum_cpu_seconds(pids: list[int]) -> float:
    """Add up the CPU seconds, of user and system, that processes have used so far."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(t.user + t.system for t in times)


def make_config(folder: Path, run: str, new_tokens: int, steps: int, staleness: int, share: str = "auto"):
    """Make the settings of a run on the data in ``folder`` and the model there, or the given one."""
    from engines.config import MegatronConfig, OptimizerConfig, VllmConfig
    from rlworker.config.run import RunConfig
    from rlworker.config.sections import DataConfig, EnvironmentConfig

    length, engines = max(64, PROMPT_TOKENS + new_tokens), OPTIONS.rollouts
    sizes = dict(max_new_tokens=new_tokens, max_model_len=length, max_num_seqs=256, kv_cache_mb=512)
    return RunConfig(
        model=str(OPTIONS.model or folder / "model"),
        run_dir=str(folder / run),
        data=DataConfig(str(folder / "train.jsonl"), max_prompt_tokens=PROMPT_TOKENS),
        actor=MegatronConfig(
            ranks=OPTIONS.ranks, share=share, micro_batch_tokens=BUDGET, optimizer=OptimizerConfig(lr=RATE)
        ),
        rollout=VllmConfig(engines=engines, staleness=staleness, **sizes),
        environment=EnvironmentConfig(turns=1, tokens=length),
        steps=steps,
        prompts_per_step=PROMPTS,
        samples_per_prompt=SAMPLES,
    )


def bench_worker(
    folder: Path, steps: int, staleness: int = 0, written: bool = False, share: str = "auto"
) -> list[dict[str, float]]:
    """Return what each step of the real engines took but the first, in seconds, by phase and by process."""
    import ray

    from rlworker.trainers.rl import Trainer

    steps_seconds = []
    run = f"run{staleness}_{share}{'_written' if written else ''}"
    config = make_config(folder, run, NEW_TOKENS, steps, staleness, share)
    with Trainer(config, write if written else reward) as trainer:
        workers = trainer.name_workers()
        pids = {name: ray.get(worker.__ray_call__.remote(lambda _: os.getpid())) for name, worker in workers.items()}
        roles = {"driver": [os.getpid()]}
        for name, pid in pids.items():
            roles.setdefault("rollout" if name.startswith("rollout") else "trainers", []).append(pid)
        for _ in range(steps):
            start_cpu = {role: sum_cpu_seconds(members) for role, members in roles.items()}
            metrics, _ = trainer.step()
            cpu = {f"cpu {role}": sum_cpu_seconds(members) - start_cpu[role] for role, members in roles.items()}
            wall = {k.replace("time_", "wall "): v for k, v in metrics.items() if k.startswith("time_")}
            steps_seconds.append(wall | cpu | {"cpu step": sum(cpu.values())})
    return steps_seconds[1:]


async def write(policy, row):
    """Sample once and reward it, as the one-turn environment of ``reward`` does."""
    from rlworker.environments import Episode

    episode = Episode(row)
    episode.reward(reward((await policy.sample(episode)).text, row))
    return episode


def average(steps_seconds: list[dict[str, float]], take: Callable) -> dict[str, float]:
    """Return the mean or the median of each number, of those that all steps have."""
    names = [name for name in steps_seconds[0] if all(name in step for step in steps_seconds)]
    return {name: take([step[name] for step in steps_seconds]) for name in names}


async def answer_at_length(policy, row):
    """Sample once, as many tokens as a long-tailed distribution says."""
    from rlworker.environments import Episode

    episode = Episode(row)
    tokens = int(min(LONGEST, max(SHORTEST, policy.random.lognormvariate(math.log(MEDIAN), SIGMA))))
    await policy.sample(episode, max_tokens=tokens)
    return episode


def bench_stub(folder: Path, steps: int, staleness: int, update_s: float) -> tuple[float, dict[str, float]]:
    """Take steps whose update sleeps for ``update_s``: seconds of a step, and the medians of the last metrics."""
    from rlworker.trainers.rl import Trainer

    class StubTrainer(Trainer):
        def _add_logprobs(self, batch):
            return batch

        def _update(self, batch):
            time.sleep(update_s)
            return {}

    run = f"stub{staleness}_{update_s:.3f}"
    with StubTrainer(make_config(folder, run, LONGEST, steps + 1 + staleness, staleness), answer_at_length) as trainer:
        for _ in range(1 + staleness):  # until as much is ahead as will be
            trainer.step()
        start = time.perf_counter()
        taken = [trainer.step()[0] for _ in range(steps)]
        return (time.perf_counter() - start) / steps, average(taken, statistics.mean)


def bench_stubs(folder: Path, steps: int) -> list[dict[str, str | float]]:
    """Measure steps beside a stub trainer at each staleness."""
    _, alone = bench_stub(folder, steps, 0, 0.0)
    rows, update_s = [], alone["time_rollout"]
    for staleness in (0, 1, 2):
        seconds, metrics = bench_stub(folder, steps, staleness, update_s)
        numbers = {"staleness": staleness, "rollout alone s": update_s, "s a step": seconds}
        numbers |= {"steps a second": 1 / seconds, "tokens": metrics["completion_tokens"]}
        numbers |= {name: metrics.get(key, 0.0) for name, key in _AHEAD.items()}
        rows.append(numbers | {"to staleness 0": rows[0]["s a step"] / seconds if rows else 1.0})
        print("  ".join(f"{name} {value:.3g}" for name, value in rows[-1].items()), flush=True)
    return rows


_AHEAD = {
    "age": "token_age_mean",
    "engine idle s": "engine_idle_seconds",
    "trainer waits s": "time_rollout",
    "alive at update": "samples_at_update",
}
"""Columns of the table, and the metrics that they show."""


def bench_single_process(folder: Path, steps: int, threads: int) -> dict[str, float]:
    """Return the same of one process that does the same work: transformers' generate, a forward and backward, AdamW."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlworker.data.rows import load_tokenizer

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = load_tokenizer(str(folder / "model"))
    rows = [json.loads(line) for line in (folder / "train.jsonl").open()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    steps_seconds = []
    for step in range(steps):
        questions = [rows[(step * PROMPTS + i) % len(rows)]["prompt"] for i in range(PROMPTS)]
        prompts = torch.tensor(tokenizer(questions)["input_ids"]).repeat_interleave(SAMPLES, 0)
        start, cpu = time.perf_counter(), time.process_time()
        with torch.no_grad():
            attention_mask = torch.ones_like(prompts)
            ids = model.generate(
                prompts, attention_mask=attention_mask, do_sample=True, max_new_tokens=NEW_TOKENS, pad_token_id=0
            )
        rollout_end = time.perf_counter()
        texts = tokenizer.batch_decode(ids[:, PROMPT_TOKENS:], skip_special_tokens=True)
        rewards = torch.tensor([reward(text, None) for text in texts]).view(PROMPTS, SAMPLES)
        advantage = (rewards - rewards.mean(1, keepdim=True)).flatten()
        logits = model(ids).logits[:, PROMPT_TOKENS - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, PROMPT_TOKENS:, None])[..., 0]
        loss = -(torch.exp(logprobs - logprobs.detach()) * advantage[:, None]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        steps_seconds.append(
            {"wall rollout": rollout_end - start, "wall update": end - rollout_end, "wall step": end - start}
            | {"cpu step": time.process_time() - cpu}
        )
    return {name: statistics.median(m[name] for m in steps_seconds[1:]) for name in steps_seconds[0]}


def bench_model(folder: Path, steps: int) -> list[dict[str, str | float]]:
    """Measure steps of the given model in each way to share, and of TRL where its environment is named."""
    found = {}
    for share in OPTIONS.share:
        found[f"share {share}"] = average(bench_worker(folder, steps, share=share), statistics.median)
        print_row(f"share {share}", found[f"share {share}"])
    if OPTIONS.trl:
        program = str(Path(__file__).with_name("trl_step.py"))
        sizes = map(str, (steps, PROMPTS, SAMPLES, NEW_TOKENS))
        command = [OPTIONS.trl, program, str(OPTIONS.model.resolve()), str(folder / "train.jsonl"), *sizes]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["OMP_NUM_THREADS"] = "1"
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment)
        if done.returncode:
            raise SystemExit(f"error: TRL ended with status {done.returncode}; its own words are above")
        found["TRL"] = json.loads(done.stdout.splitlines()[-1])
        print_row("TRL", found["TRL"])
        for title, numbers in found.items():
            ratios = (
                f"{kind} {numbers[f'{kind} step'] / found['TRL'][f'{kind} step']:.2f}" for kind in ("wall", "cpu")
            )
            print(f"{title} over TRL: {', '.join(ratios)}")
    else:
        print("TRL is not measured: --trl names the Python of an environment that has it, as of python -m venv ENV and")
        print("ENV/bin/pip install trl datasets requests")
    return [make_row(title, numbers) for title, numbers in found.items()]


def print_row(title: str, numbers: dict[str, float]) -> None:
    print(f"{title:28s}" + "  ".join(f"{name} {value * 1000:.0f}" for name, value in numbers.items()))


def make_row(title: str, numbers: dict[str, float]) -> dict[str, str | float]:
    return {"process": title} | {f"{name} ms": 1000 * value for name, value in numbers.items()}


def compare(found: dict[str, list[dict[str, float]]]) -> list[dict[str, str | float]]:
    """Compare the means of two kinds of steps, by their titles."""
    means = {title: average(steps, statistics.mean) for title, steps in found.items()}
    for title, numbers in means.items():
        print_row(f"{title}, means", numbers)
    first, second = means.values()
    ratios = (f"{kind} {second[f'{kind} step'] / first[f'{kind} step']:.2f}" for kind in ("wall", "cpu"))
    print(f"{'':28s}the latter over the former: {', '.join(ratios)}")
    return [make_row(f"{title}, means", numbers) for title, numbers in means.items()]


def main() -> None:
    steps = 2 if OPTIONS.tiny else OPTIONS.steps
    if steps < 2:
        PARSER.error(f"--steps must be at least 2, got {steps}: the first one is not measured")
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        if OPTIONS.model:
            write_figures(OPTIONS.json, bench_model(folder, steps))
            return
        if OPTIONS.stub_trainer:
            write_figures(OPTIONS.json, bench_stubs(folder, steps))
            return
        print("milliseconds of a step, medians:")
        found = bench_worker(folder, steps)
        worker = average(found, statistics.median)
        print_row("rlworker", worker)
        rows = [make_row(f"rlworker, {OPTIONS.ranks} rank(s)", worker)]
        if OPTIONS.written:
            found = {"rewarded": found, "written": bench_worker(folder, steps, written=True)}
            write_figures(OPTIONS.json, rows + compare(found))
            return
        if ahead := OPTIONS.staleness:
            rows += compare({"in turns": found, f"staleness {ahead}": bench_worker(folder, steps, ahead)})
        for threads in (1, 2):
            single = bench_single_process(folder, steps, threads)
            print_row(f"one process, {threads} thread(s)", single)
            ratios = (f"{kind} {worker[f'{kind} step'] / single[f'{kind} step']:.2f}" for kind in ("wall", "cpu"))
            print(f"{'':28s}ours over it: {', '.join(ratios)}")
            rows.append(make_row(f"one process, {threads} thread(s)", single))
    write_figures(OPTIONS.json, rows)


if __name__ == "__main__":
    main()
