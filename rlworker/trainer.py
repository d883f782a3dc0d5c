"""The controller: one process that starts the engines and runs the steps."""

import time
from dataclasses import replace
from functools import partial

import ray
import torch

from engines.batch import Completion, TrainBatch
from engines.interfaces import LossFn, Sampling, StepResult
from rlworker.advantages import AdvantageFn, grpo
from rlworker.checkpoint import RunFolder
from rlworker.config import RunConfig
from rlworker.data import Row, load_tokenizer, read_rows, rows_of_step
from rlworker.group import StartingGroup, start_ray
from rlworker.losses import policy_loss
from rlworker.metrics import RunLog, StepClock
from rlworker.report import write_report
from rlworker.rewards import RewardFn
from rlworker.rollout import Rollouts, logprob_difference, to_batch

BUCKET_BYTES = 256 * 2**20
"""Weights travel in buckets of this size."""
SHARD_BYTES = 4 * 2**30
"""A saved HuggingFace model is cut into files of this size."""
SAMPLES_KEPT = 8
"""Samples of a step that are kept when it is evaluated."""


class Trainer:
    """A run of rollouts and updates.

    Everything that a user can get wrong is checked when this is built; ``start`` then starts the engines, and ``fit``
    runs to the last step. Use it as a context manager, so that the engines end with it.

    Args:
        reward: ``reward(text, row) -> float``.
        advantage: ``advantage(batch) -> [N]``. loss: what an update minimises; None takes the clipped policy loss with
            the coefficients of ``config.algorithm``.
    """

    def __init__(
        self,
        config: RunConfig,
        reward: RewardFn,
        *,
        advantage: AdvantageFn = grpo,
        loss: LossFn | None = None,
    ):
        self.config, self.reward, self.advantage = config, reward, advantage
        self.model = config.check_model()
        self.folder = RunFolder(config.run_dir)
        self.folder.check(config.resume)
        self.tokenizer = load_tokenizer(config.model)
        read = partial(read_rows, tokenizer=self.tokenizer, max_prompt_tokens=config.data.max_prompt_tokens)
        self.rows = read(config.data.train)
        self.heldout = read(config.data.heldout) if config.data.heldout else []
        algorithm = config.algorithm
        clips = dict(clip_low=algorithm.clip_low, clip_high=algorithm.clip_high, kl_coef=algorithm.kl_coef)
        self.loss = loss or partial(policy_loss, **clips)
        self.steps_done = self.version = 0

    # -- engines

    def __enter__(self) -> "Trainer":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def start(self) -> None:
        """Start every engine at the same time, then claim the run folder."""
        config = self.config
        start_ray(config.actors)
        group = partial(
            StartingGroup,
            config.platform,
            self.model,
            config.actor_of_run,
            config.rollout.temperature,
            seed=config.seed,
        )
        rollouts = Rollouts(config.platform, self.model, config.rollout)
        actor = group(trainable=True)
        reference = group(trainable=False) if config.with_reference else None
        self.actor, self.rollouts = actor.ready(), rollouts.ready()
        self.reference = reference.ready() if reference else None
        state = self.folder.claim(config)  # not before: a start that fails must not leave a folder that looks taken
        if state:
            self._restore(state)
        self.log = RunLog(self.folder.path, config.steps, self.steps_done)

    def stop(self) -> None:
        """End the engines. What was written stays."""
        if hasattr(self, "log"):
            self.log.close()
        ray.shutdown()

    # -- the run

    def fit(self) -> dict[str, float]:
        """Run to the last step, evaluating and saving on the way. Returns the metrics of the last step."""
        config, metrics = self.config, {}
        if self.steps_done == 0:
            self.log.step(0, self.evaluate())
        while self.steps_done < config.steps:
            metrics = self.step()
            last = self.steps_done == config.steps
            if last or (config.eval_every and self.steps_done % config.eval_every == 0):
                metrics |= self.evaluate()
            self.log.step(self.steps_done, metrics)
            if last or (config.save_every and self.steps_done % config.save_every == 0):
                self.save()
        write_report(self.folder.path)
        return metrics

    def step(self) -> dict[str, float]:
        """One rollout and its update."""
        config, clock = self.config, StepClock()
        rows = rows_of_step(self.rows, config.prompts_per_step, self.steps_done, config.seed)
        with clock.phase("rollout"):
            completions = self.rollouts.generate(rows, self._sampling(config.samples_per_prompt))
        with clock.phase("reward"):
            texts, rewards = self._score(rows, completions)
            batch = to_batch(rows, completions, rewards)
        with clock.phase("logprobs"):
            batch = self._with_logprobs(batch)
        batch = replace(batch, advantages=self.advantage(batch))
        with clock.phase("update"):
            metrics = self._update(batch)
        with clock.phase("sync"):
            self.sync_weights()
        self.steps_done += 1
        if self._is_shown():
            self._keep_samples(rows, texts, rewards, completions)
        return _rollout_metrics(completions, rewards, batch, clock.total()) | metrics

    def evaluate(self) -> dict[str, float]:
        """Mean reward of greedy completions of the held-out rows; empty without such rows."""
        if not self.heldout:
            return {}
        started = time.perf_counter()
        completions = self.rollouts.generate(self.heldout, replace(self._sampling(1), temperature=0.0))
        _, rewards = self._score(self.heldout, completions)
        return {"heldout": sum(rewards) / len(rewards), "time_evaluate": time.perf_counter() - started}

    # -- parts of a step

    def _sampling(self, count: int) -> Sampling:
        rollout = self.config.rollout
        seed = self.config.seed * 1_000_003 + self.steps_done
        return Sampling(count, rollout.temperature, rollout.max_new_tokens, seed, (self.tokenizer.eos_token_id,))

    def _score(self, rows: list[Row], completions: list[list[Completion]]) -> tuple[list[str], list[float]]:
        """Text and reward of every completion, group by group."""
        pairs = [(row, sample) for row, group in zip(rows, completions, strict=True) for sample in group]
        texts = self.tokenizer.batch_decode([sample.token_ids for _, sample in pairs], skip_special_tokens=True)
        return texts, [float(self.reward(text, row)) for text, (row, _) in zip(texts, pairs, strict=True)]

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
        for mini in batch.split(self.config.algorithm.mini_batches):
            tokens = float(mini.mask.sum())
            results = self.actor.call_sharded("train_step", mini, self.loss, tokens)
            parts.append(_step_metrics(results, tokens))
            if logprobs is None:
                logprobs = _logprobs(results)
        metrics = {
            name: max(part[name] for part in parts)
            if name.endswith("_max")
            else sum(p[name] for p in parts) / len(parts)
            for name in parts[0]
        }
        difference = logprob_difference(batch, logprobs)
        self._check_difference(difference)
        return metrics | difference

    def _check_difference(self, difference: dict[str, float]) -> None:
        limits = self.config.logprob_limits
        found = difference["logprob_diff_mean"], difference["logprob_diff_max"]
        if all(f <= limit for f, limit in zip(found, limits)):
            return
        text = (
            f"step {self.steps_done + 1}: rollout and trainer disagree on the logprobs of the same tokens: mean "
            f"{found[0]:.1e}, max {found[1]:.1e}, limits {limits[0]:.1e} and {limits[1]:.1e}. Weights did not arrive "
            "whole, or the engines compute different models"
        )
        if not self.config.ignore_logprob_diff:
            raise RuntimeError(f"{text}; to go on all the same raise --logprob-diff-mean or set --ignore-logprob-diff")
        self.log.note(f"WARNING {text}")

    def sync_weights(self) -> None:
        """Send the actor's weights to every rollout engine, as the next version."""
        self.version += 1
        self.actor.call("sync_weights", self.rollouts.actors, self.version, BUCKET_BYTES)

    def _is_shown(self) -> bool:
        every = self.config.eval_every
        return self.steps_done in (1, self.config.steps) or bool(every and self.steps_done % every == 0)

    def _keep_samples(self, rows: list[Row], texts: list[str], rewards: list[float], completions) -> None:
        """The first completion of some prompts."""
        group = self.config.samples_per_prompt
        kept = [
            {"prompt": row.prompt, "completion": texts[i * group], "answer": row.answer, "reward": rewards[i * group]}
            | {"version": completions[i][0].version}
            for i, row in enumerate(rows[:SAMPLES_KEPT])
        ]
        self.log.rollouts(self.steps_done, kept)

    # -- checkpoints

    def save(self) -> None:
        """Write a checkpoint: the trainer's state and the model as a HuggingFace folder (``hf``)."""
        partial_folder = self.folder.begin_checkpoint(self.steps_done)
        (partial_folder / "actor").mkdir()
        self.actor.call("save", str(partial_folder / "actor"))
        self.actor.call("save_hf", str(partial_folder / "hf"), SHARD_BYTES)
        self.folder.finish_checkpoint(partial_folder, {"step": self.steps_done, "version": self.version})

    def _restore(self, state: dict) -> None:
        self.steps_done, self.version = state["step"], state["version"] - 1
        self.actor.call("load", f"{state['folder']}/actor")
        self.sync_weights()


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
