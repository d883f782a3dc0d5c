"""The controller: one process that starts the engines and runs the steps."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial

import torch

from engines.batch import Completion, TrainBatch
from engines.interfaces import LossFn, Sampling, StepResult
from hardware.capabilities import override_warnings
from rlworker.advantages import AdvantageFn, grpo
from rlworker.checkpoint import RunFolder
from rlworker.cluster import naming_failures, ray_for
from rlworker.config import RunConfig
from rlworker.data import Row, Rows, check_vocabulary, load_tokenizer, read_rows, rows_of_step
from rlworker.errors import RunError
from rlworker.group import BUCKET_BYTES, SHARD_BYTES, StartingGroup
from rlworker.losses import policy_loss
from rlworker.metrics import RunLog, StepClock
from rlworker.refused import save_refused
from rlworker.report import write_report
from rlworker.reward_pool import RewardPool, Scores, pickled
from rlworker.rewards import BatchRewardFn, RewardFn
from rlworker.rollout import Rollouts, logprob_difference, to_batch
from rlworker.trackers import Trackers, check_trackers

CANARY_TOKENS = 4
"""Tokens that each rollout engine samples after a weight sync, to be compared with the actor's logprobs of them."""
_BETWEEN_STEPS = ("evaluate", "save", "restore")
"""Phases that belong to the last step that was done rather than to the one that runs."""
SAMPLES_KEPT = 8
"""Samples kept of a step that is evaluated."""


class Trainer:
    """A run of rollouts and updates.

    Everything that a user can get wrong is checked when this is built; ``start`` then starts the engines, and ``fit``
    runs to the last step. Use it as a context manager, so that the engines end with it.

    Args:
        reward: ``reward(text, row) -> float``, or marked with ``batch_reward``.
        advantage: ``advantage(batch) -> [N]``. loss: what an update minimises; None takes the clipped policy loss with
            the coefficients of ``config.algorithm``.
    """

    def __init__(
        self,
        config: RunConfig,
        reward: RewardFn | BatchRewardFn,
        *,
        advantage: AdvantageFn = grpo,
        loss: LossFn | None = None,
    ):
        self.config, self.reward, self.advantage = config, reward, advantage
        pickled(reward)  # one that cannot be sent to the processes that call it is refused here
        self.model = config.check_model()
        self.folder = RunFolder(config.run_dir)
        self.folder.check(config)
        check_trackers(config.trackers)
        self.tokenizer = load_tokenizer(config.model)
        read = partial(read_rows, tokenizer=self.tokenizer, data=config.data)
        train = read(config.data.train)
        heldout = read(config.data.heldout) if config.data.heldout else Rows([], skipped=0)
        self.rows, self.heldout = train.rows, heldout.rows
        check_vocabulary([*self.rows, *self.heldout], self.tokenizer, self.model.vocab)
        self.skipped = {"skipped_train": train.skipped, "skipped_heldout": heldout.skipped}
        algorithm = config.algorithm
        clips = dict(clip_low=algorithm.clip_low, clip_high=algorithm.clip_high, kl_coef=algorithm.kl_coef)
        self.loss = loss or partial(policy_loss, **clips)
        self.steps_done = self.version = 0
        self.running, self.engines = ExitStack(), []
        self.log: RunLog | None = None

    # -- engines

    def __enter__(self) -> "Trainer":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def start(self) -> None:
        """Start every engine at the same time, then claim the run folder."""
        config, clock = self.config, StepClock()
        self.running.enter_context(ray_for(config.actors))
        rollouts = self._start(Rollouts(config.platform, self.model, config.rollout))  # first: vLLM takes longest
        actor = self._start(self._trainers("actor", trainable=True))
        reference = self._start(self._trainers("reference", trainable=False)) if config.with_reference else None
        self.rewards = self._start(RewardPool(self.reward, config.reward))  # last: it is soon there
        with self._phase(clock, "start_trainers"):
            self.actor = actor.ready()
            self.reference = reference.ready() if reference else None
        with self._phase(clock, "start_rollouts"):  # what they need beyond the trainers, beside which they start
            self.rollouts = rollouts.ready()
        state = self.folder.claim(config)  # not before: a start that fails must not leave a folder that looks taken
        self.steps_done = state["step"] if state else 0
        trackers = Trackers(config.trackers, self.folder.path, self.steps_done, asdict(config))
        self.log = self.running.enter_context(RunLog(self.folder.path, config.steps, self.steps_done, trackers))
        for warning in override_warnings(config.actor.attention_override):
            self.log.note(warning)
        if any(self.skipped.values()):
            counts = " and ".join(f"{count} of {name.removeprefix('skipped_')}" for name, count in self.skipped.items())
            self.log.note(f"data: skipped prompts longer than {config.data.max_prompt_tokens} tokens: {counts}")
        if state:
            with self._phase(clock, "restore"):
                self._restore(state)
        self.start_seconds = clock.seconds

    def _trainers(self, role: str, trainable: bool) -> StartingGroup:
        config = self.config
        settings = (config.actor_of_run, config.rollout.temperature, trainable, config.seed)
        return StartingGroup(role, config.platform, self.model, *settings)

    def stop(self) -> None:
        """End the engines, and Ray where it was started for them. What was written stays."""
        self.running.close()

    @contextmanager
    def _phase(self, clock: StepClock, name: str) -> Iterator[None]:
        """A phase on the clock, in which a worker that fails is named."""
        workers = {name: actor for engine in self.engines for name, actor in engine.workers().items()}
        step = self.steps_done if name in _BETWEEN_STEPS else self.steps_done + 1
        where = f"step {step}, phase {name}" if self.log else f"phase {name}"
        advice = ". What was saved is whole: go on from it with --resume" if self.log else ""
        with clock.phase(name), naming_failures(where, workers, advice):
            yield

    def _start(self, engine: Rollouts | StartingGroup | RewardPool) -> Rollouts | StartingGroup | RewardPool:
        self.running.callback(engine.stop)
        self.engines.append(engine)
        return engine

    # -- the run

    def fit(self) -> dict[str, float]:
        """Run to the last step, evaluating and saving on the way. Returns the metrics of the last step."""
        config, metrics = self.config, {}
        if self.steps_done == 0:
            self.log.step(0, self.evaluate() | self.start_seconds | self.skipped)
        try:
            while self.steps_done < config.steps:
                metrics, samples = self.step()
                last = self.steps_done == config.steps
                if last or _is_due(self.steps_done, config.eval_every):
                    metrics |= self.evaluate()
                if self.steps_done == 1 or "heldout" in metrics:
                    self.log.rollouts(self.steps_done, samples)
                self.log.step(self.steps_done, metrics)
                if last or _is_due(self.steps_done, config.save_every):
                    self.save()
        finally:  # a run that stops has a report too
            self.log.note(f"report: {write_report(self.folder.path)}")
        return metrics

    def step(self) -> tuple[dict[str, float], list[dict]]:
        """One rollout and its update: its metrics, and some of its samples."""
        config, clock = self.config, StepClock()
        rows = rows_of_step(self.rows, config.prompts_per_step, self.steps_done, config.seed)
        with self._phase(clock, "rollout"):
            completions = self.rollouts.generate(rows, self._sampling(config.samples_per_prompt))
            self._check_versions(completions)
        with self._phase(clock, "reward"):
            texts, scores = self._score(rows, completions)
            batch = to_batch(rows, completions, scores.values)
        with self._phase(clock, "logprobs"):
            batch = self._with_logprobs(batch)
        batch = replace(batch, advantages=self.advantage(batch))
        with self._phase(clock, "update"):
            metrics = self._update(batch)
        with self._phase(clock, "sync"):
            self.sync_weights()
        with self._phase(clock, "canary"):
            self.check_canary()
        self.steps_done += 1
        samples = _some_samples(rows, completions, texts, scores.values)
        metrics |= scores.counts("reward")
        return _rollout_metrics(completions, scores.values, batch, clock.total()) | metrics, samples

    def evaluate(self) -> dict[str, float]:
        """Mean reward of greedy completions of the held-out rows; empty without such rows."""
        if not self.heldout:
            return {}
        clock = StepClock()
        with self._phase(clock, "evaluate"):
            completions = self.rollouts.generate(self.heldout, replace(self._sampling(1), temperature=0.0))
            _, scores = self._score(self.heldout, completions)
        mean = sum(scores.values) / len(scores.values)
        return {"heldout": mean} | scores.counts("heldout") | clock.seconds

    # -- parts of a step

    def _sampling(self, count: int) -> Sampling:
        rollout = self.config.rollout
        seed = self.config.seed * 1_000_003 + self.steps_done
        return Sampling(count, rollout.temperature, rollout.max_new_tokens, seed, (self.tokenizer.eos_token_id,))

    def _score(self, rows: list[Row], completions: list[list[Completion]]) -> tuple[list[str], Scores]:
        """Text and reward of every completion, group by group."""
        pairs = [(row, sample) for row, group in zip(rows, completions, strict=True) for sample in group]
        texts = self.tokenizer.batch_decode([sample.token_ids for _, sample in pairs], skip_special_tokens=True)
        scores = self.rewards.score(texts, [row for row, _ in pairs])
        if scores.failures:
            self.log.note(f"WARNING after {self.steps_done} steps: {scores.summary()}")
        return texts, scores

    def _check_versions(self, completions: list[list[Completion]]) -> None:
        if (versions := {sample.version for group in completions for sample in group}) != {self.version}:
            raise RunError(f"rollout: samples of weights {sorted(versions)}, expected version {self.version} alone")

    def _with_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Logprobs of the rollout's weights and of the reference, where the update will not make them itself."""
        if self.config.algorithm.mini_batches > 1:
            batch = replace(batch, old_logprobs=_logprobs(self.actor.call_sharded("forward", batch)))
        if self.reference:
            batch = replace(batch, ref_logprobs=_logprobs(self.reference.call_sharded("forward", batch)))
        return batch

    def _update(self, batch: TrainBatch) -> dict[str, float]:
        """The optimizer steps of one rollout; the trainer's own logprobs must agree with the rollout's."""
        parts, logprobs = [], batch.old_logprobs
        if logprobs is not None:  # known before anything is learned from them
            self._check_difference(f"step {self.steps_done + 1}", logprob_difference(batch, logprobs))
        for mini in batch.split(self.config.algorithm.mini_batches):
            tokens = float(mini.mask.sum())
            results = self.actor.call_sharded("train_step", mini, self.loss, tokens)
            parts.append(_step_metrics(results, tokens))
            if math.isnan(parts[-1]["grad_norm"]):  # the engine did not step
                self._refuse(mini, _logprobs(results))
            if logprobs is None:
                logprobs = _logprobs(results)
                self._check_difference(f"step {self.steps_done + 1}", logprob_difference(batch, logprobs))
        return _mean_of_mini_batches(parts) | logprob_difference(batch, logprobs)

    def _refuse(self, batch: TrainBatch, logprobs: torch.Tensor) -> None:
        path = self.folder.path / "refused" / f"step_{self.steps_done + 1:06d}.jsonl"
        count = save_refused(path, batch, logprobs, self.tokenizer)
        raise RunError(
            f"step {self.steps_done + 1}: the gradient is not finite, so the step was not taken. "
            f"{count} of {len(batch)} rows may be why: see {path}. If their numbers are finite, lower --actor.lr or "
            "--actor.clip-grad; if not, mend what made them (reward, advantage, loss)"
        )

    def _check_difference(self, where: str, difference: dict[str, float]) -> None:
        limits = self.config.logprob_limits
        found = difference["logprob_diff_mean"], difference["logprob_diff_max"]
        if all(f <= limit for f, limit in zip(found, limits)):
            return
        text = (
            f"{where}: rollout and trainer disagree on the logprobs of the same tokens: mean "
            f"{found[0]:.1e}, max {found[1]:.1e}, limits {limits[0]:.1e} and {limits[1]:.1e}. Weights did not arrive "
            "whole, or the engines compute different models"
        )
        if not self.config.ignore_logprob_diff:
            raise RunError(f"{text}; to go on all the same raise --logprob-diff-mean or set --ignore-logprob-diff")
        self.log.note(f"WARNING {text}")

    def sync_weights(self) -> None:
        """Send the actor's weights to every rollout engine, as the next version."""
        self.version += 1
        self.actor.call("sync_weights", self.rollouts.actors, self.version, BUCKET_BYTES)
        if (versions := self.rollouts.versions()) != [self.version] * len(versions):
            raise RunError(f"sync: version {self.version} was sent and the rollout engines have {versions}")

    def check_canary(self) -> None:
        """Have every rollout engine continue one prompt, and the actor's logprobs of it agree with the engine's."""
        rows = self.rows[:1] * (len(self.rollouts.actors) * self.actor.dp_size)
        sampling = replace(self._sampling(1), max_tokens=min(CANARY_TOKENS, self.config.rollout.max_new_tokens))
        batch = to_batch(rows, self.rollouts.generate(rows, sampling), [0.0] * len(rows))
        logprobs = _logprobs(self.actor.call_sharded("forward", batch))
        self._check_difference(f"after sync {self.version}", logprob_difference(batch, logprobs))

    # -- checkpoints

    def save(self) -> None:
        """Write a checkpoint: the trainer's state and the model as a HuggingFace folder (``hf``)."""
        with self._phase(StepClock(), "save"):
            self._save()

    def _save(self) -> None:
        partial_folder = self.folder.begin_checkpoint(self.steps_done)
        (partial_folder / "actor").mkdir()
        self.actor.call("save", str(partial_folder / "actor"))
        self.actor.call("save_hf", str(partial_folder / "hf"), SHARD_BYTES)
        self.folder.finish_checkpoint(partial_folder, {"step": self.steps_done, "version": self.version})

    def _restore(self, state: dict) -> None:
        self.version = state["version"] - 1  # the sync makes it the version that the run had
        self.actor.call("load", f"{state['folder']}/actor")
        self.sync_weights()
        self.check_canary()


def _is_due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _some_samples(rows: list[Row], completions, texts: list[str], rewards: list[float]) -> list[dict]:
    """The first completion of the first prompts."""
    size = len(completions[0])
    return [
        {"prompt": row.prompt, "completion": texts[i * size], "answer": row.answer, "reward": rewards[i * size]}
        | {"version": completions[i][0].version}
        for i, row in enumerate(rows[:SAMPLES_KEPT])
    ]


def _mean_of_mini_batches(parts: list[dict[str, float]]) -> dict[str, float]:
    means = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
    return means | {name: max(part[name] for part in parts) for name in means if name.endswith("_max")}


def _logprobs(results: list) -> torch.Tensor:
    return torch.cat([result.logprobs for result in results])


def _step_metrics(results: list[StepResult], tokens: float) -> dict[str, float]:
    """Means over the tokens of an optimizer step, from each replica's sums."""
    metrics = {"grad_norm": results[0].grad_norm, "lr": results[0].lr}
    for name in results[0].metrics:
        values = [result.metrics[name] for result in results]
        metrics[name] = max(values) if name.endswith("_max") else sum(values) / tokens
    return metrics


def _rollout_metrics(completions, rewards: list[float], batch: TrainBatch, times: dict[str, float]) -> dict[str, float]:
    samples = [sample for group in completions for sample in group]
    tokens = sum(len(sample.token_ids) for sample in samples)
    grouped = torch.tensor(rewards).view(len(completions), -1)
    return {
        "reward": float(grouped.mean()),
        "reward_std": float(grouped.std(dim=1).mean()) if grouped.shape[1] > 1 else 0.0,
        "groups_alike": float((grouped == grouped[:, :1]).all(dim=1).float().mean()),
        "completion_tokens": tokens / len(samples),
        "truncated": sum(not sample.finished for sample in samples) / len(samples),
        "version": int(batch.versions.min()),
        "tokens_per_second": tokens / times["time_step"],
    } | times
