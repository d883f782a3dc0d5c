"""The manager of rollouts chooses a step's prompts, has them sampled and keeps the groups that the step learns from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from engines.batch.batch import TrainBatch
from engines.batch.samples import Sampling
from rlworker.base.errors import NothingScored, RunError
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.workers import RolloutWorker
from rlworker.config.run import RunConfig
from rlworker.data.rows import Row, pick_rows
from rlworker.environments.codec import Codec
from rlworker.environments.processes.pool import ENVIRONMENT_LOG
from rlworker.rollouts.loop import RolloutLoop
from rlworker.rollouts.metrics import SAMPLES_KEPT, Scores, describe_trajectory, score_groups, summarise_groups
from rlworker.rollouts.trajectory import RolloutBatch, TrajectoryGroup, batch_groups, has_zero_variance
from rlworker.tracking.log import StepClock

if TYPE_CHECKING:  # most runs have no curriculum
    from torch import Tensor

    from rlworker.rollouts.curriculum import Curriculum

TRAINING, CANARY, STREAM, VALIDATION = range(4)
"""Purposes of sampling, each with random numbers of its own. Held-out set number i uses ``VALIDATION + i``."""
_NEWEST_SHARE = 0.2
"""Weight of the newest rollout in the running mean of the completions' lengths."""


class RolloutManager:
    """Draws prompts, has their episodes run, and keeps the groups that a step learns from.

    Args:
        codec: knows the stop tokens of every sample.
        rows: the training rows to draw from.
        rollouts: the vLLM engines.
        loop: runs the episodes.
        phase: ``phase(clock, name)`` returns the context in which a phase of a step is timed.
        warn: is given a line of text where episodes failed, and once what an episode noted.
        curriculum: picks the prompts; without one they follow in an order that is shuffled anew in every epoch.
        find_teaching: tells dynamic sampling which groups of a batch teach, ``[P]`` bool. Without it those teach whose
            episodes have different rewards.

    Attributes:
        rollouts_done: number of training rollouts so far.
        completion_tokens: running mean of the completions' lengths, by which the next lengths are estimated. A
            checkpoint holds both attributes and ``prompts_done``, since they decide what is sampled next.
    """

    def __init__(
        self,
        config: RunConfig,
        codec: Codec,
        rows: list[Row],
        rollouts: Rollouts,
        loop: RolloutLoop,
        phase: Callable,
        warn: Callable[[str], None],
        curriculum: Curriculum | None = None,
        find_teaching: Callable[[TrainBatch], Tensor] | None = None,
    ):
        self.config, self.codec, self.rows = config, codec, rows
        self.rollouts, self.loop, self.phase, self.warn = rollouts, loop, phase, warn
        self.curriculum, self._find_teaching = curriculum, find_teaching
        self._begun, self._engines_idle_s = deque[RolloutBatch](), 0.0
        self.rollouts_done = 0
        self._since, self._prompts_before = 0, 0
        self._told: set[str] = set()
        self.completion_tokens = float(config.rollout.max_new_tokens)

    def sample(self, clock: StepClock, version: int) -> tuple[list[TrajectoryGroup], dict[str, float]]:
        """Draw the groups of a step, sampled by weights of ``version``, and the metrics of everything that was drawn
        for it.

        With dynamic sampling, groups that teach nothing are dropped, and groups of further prompts take their place
        (DAPO, arXiv:2503.14476, section 3.2). Fewer groups than ``prompts_per_step``, or none, may be left. The list is
        empty too where no episode sampled a token.

        Raises:
            NothingScored: every episode failed.
        """
        config, further = self.config, self.config.algorithm.parts.dynamic_sampling
        kept_groups, dropped_groups, first, rewards = [], [], self.rollouts_done, []
        if self.curriculum:
            self.curriculum.forget_before(first)
        questions = self.loop.questions if config.models else None
        environment_s, verdicts_s = self.loop.environment_seconds, questions.seconds if questions else 0.0
        for _ in range(1 + further):
            groups = self._draw_next(partial(self.phase, clock))
            self.rollouts_done += 1
            self._note_samples(groups, version)
            rewards.append([[trajectory.reward for trajectory in group] for group in groups])
            teaching = self._list_teaching(groups) if further else [True] * len(groups)
            for group, teaches in zip(groups, teaching, strict=True):
                (kept_groups if teaches else dropped_groups).append(group)
            if len(kept_groups) >= config.prompts_per_step:
                break
        drawn_groups = kept_groups + dropped_groups
        scores = score_groups(drawn_groups, self.codec)
        if scores.all_failed:
            self.rollouts_done = first  # a run that goes on is asked the same once more
            raise NothingScored(_explain_failures(scores))
        metrics = summarise_groups(drawn_groups) | scores.count_failures("episode")
        if self.curriculum:
            for draw, of_draw in enumerate(rewards, first):
                self.curriculum.note(draw, of_draw)
            metrics |= self.curriculum.measure()
        if not config.rollout.staleness:
            metrics["time_environment"] = self.loop.environment_seconds - environment_s
        if questions:
            metrics["time_verdicts"] = questions.seconds - verdicts_s
        groups = kept_groups[: config.prompts_per_step]
        completions = (completion for group in groups for one in group for completion in one.completions)
        return groups if any(len(completion.token_ids) for completion in completions) else [], metrics

    def _list_teaching(self, groups: Sequence[TrajectoryGroup]) -> list[bool]:
        """List of groups whether they teach: groups of different rewards do, others where their advantages say so."""
        differ = [not has_zero_variance(group) for group in groups]
        if all(differ) or not self._find_teaching:
            return differ
        teaching = self._find_teaching(batch_groups(groups)).tolist()
        return [has or teaches for has, teaches in zip(differ, teaching, strict=True)]

    def score_greedy(self, rows: list[Row]) -> Scores:
        """Run one episode of each row at temperature 0, and return their rewards and failures."""
        groups = self._draw(rows, replace(self.make_sampling(1), temperature=0.0), lambda _: nullcontext())
        return score_groups(groups, self.codec)

    def draw_heldout(self, place: int, rows: list[Row], count: int, temperature: float) -> list[TrajectoryGroup]:
        """Run ``count`` episodes of each row of held-out set number ``place``; temperature 0 samples greedily."""
        sampling = replace(self.make_sampling(count, VALIDATION + place), temperature=temperature)
        return self._draw(rows, sampling, lambda _: nullcontext())

    def run_ahead(self, most: int) -> None:
        """Begin the rollouts that the present weights may sample: the next one, and ``rollout.staleness`` further ones.

        Without staleness nothing is begun. Call it after each weight sync.

        Args:
            most: number of rollouts that the run still needs.
        """
        staleness = self.config.rollout.staleness
        while staleness and len(self._begun) < min(most, 1 + staleness):
            self._begun.append(self.loop.begin(*self._plan(self.rollouts_done + len(self._begun))))

    @property
    def prompts_done(self) -> int:
        """Number of prompts in all training rollouts so far; ``prompts_per_step`` may have changed between them."""
        return self._count_prompts(self.rollouts_done)

    def go_on(
        self, rollouts_done: int, completion_tokens: float, prompts_done: int | None, curriculum: dict | None = None
    ) -> None:
        """Continue from a checkpoint. Rollouts that were begun are forgotten, and drawn again.

        Args:
            rollouts_done, completion_tokens: as in the attributes.
            prompts_done: number of prompts so far; None where every rollout had ``prompts_per_step`` of them.
            curriculum: state of the curriculum, from ``Curriculum.get_state``.
        """
        if self.curriculum:
            self.curriculum.restore(curriculum)
        self.rollouts_done, self.completion_tokens = rollouts_done, completion_tokens
        alike = rollouts_done * self.config.prompts_per_step
        self._since, self._prompts_before = rollouts_done, alike if prompts_done is None else prompts_done
        self._begun.clear()
        self.loop.forget((self.config.seed, rollouts_done, STREAM))

    def get_state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: ``rollouts``, ``prompts``, ``completion_tokens`` and ``curriculum``."""
        state = {"rollouts": self.rollouts_done, "prompts": self.prompts_done}
        state |= {"curriculum": self.curriculum.get_state()} if self.curriculum else {}
        return state | {"completion_tokens": self.completion_tokens}

    def measure_ahead(self, batch: TrainBatch, version: int) -> dict[str, float]:
        """Measure how far rollouts run ahead of the trainer, as metrics; empty without staleness.

        The metrics are the ages of the step's tokens in updates, the seconds in which engines were idle since the last
        call, and the number of samples that were in progress.
        """
        if not self.config.rollout.staleness:
            return {}
        ages = version - batch.require_column("versions")[batch.mask]
        idle, alive = zip(*self.rollouts.call(RolloutWorker.measure_load), strict=True)
        seconds, self._engines_idle_s = sum(idle) / len(idle) - self._engines_idle_s, sum(idle) / len(idle)
        return {
            "token_age_mean": float(ages.float().mean()),
            "token_age_max": int(ages.max()),
            "engine_idle_seconds": max(0.0, seconds),
            "samples_at_update": sum(alive),
        }

    def list_row_numbers(self, first: int) -> list[int]:
        """List the numbers of the rows that were drawn from rollout number ``first`` on."""
        draws = range(first, self.rollouts_done)
        return [number for draw in draws for number in self._pick_numbers(draw)]

    def pick(self, groups: Sequence[TrajectoryGroup]) -> list[dict]:
        """Describe the first trajectory of the first few groups, as ``rollouts`` of a run folder stores them."""
        return [describe_trajectory(group[0], self.codec) for group in groups[:SAMPLES_KEPT]]

    def make_sampling(self, count: int, use: int = TRAINING, draw: int | None = None) -> Sampling:
        """Make the sampling settings of a rollout, with ``count`` completions for each prompt.

        Args:
            use: the purpose, one of ``TRAINING``, ``CANARY``, ``STREAM`` and ``VALIDATION`` onward; it selects the
                random numbers.
            draw: number of the rollout; None is the next.
        """
        number = self.rollouts_done if draw is None else draw
        rollout, stream = self.config.rollout, (self.config.seed, number, use)
        return Sampling(
            count,
            rollout.temperature,
            rollout.max_new_tokens,
            stream,
            self.codec.stop_token_ids,
            expected_tokens=self.completion_tokens,
            top_logprobs=self.config.top_logprobs if use == TRAINING else 0,
        )

    def _pick_numbers(self, draw: int) -> list[int]:
        config = self.config
        if self.curriculum:
            return self.curriculum.pick(draw, config.prompts_per_step)
        return pick_rows(range(len(self.rows)), config.prompts_per_step, self._count_prompts(draw), config.seed)

    def _count_prompts(self, draw: int) -> int:
        """Count the prompts of the rollouts before that of number ``draw``."""
        return self._prompts_before + (draw - self._since) * self.config.prompts_per_step

    def _plan(self, draw: int) -> tuple[list[Row], Sampling]:
        """Plan a rollout: its rows, and how completions of them are drawn."""
        rows = [self.rows[number] for number in self._pick_numbers(draw)]
        return rows, self.make_sampling(self.config.samples_per_prompt, draw=draw)

    def _draw_next(self, phase: Callable) -> list[TrajectoryGroup]:
        """Draw the groups of the next rollout, or wait for them where they were begun before."""
        if not self.config.rollout.staleness:
            return self._draw(*self._plan(self.rollouts_done), phase)
        if not self._begun:
            self.run_ahead(1)
        with phase("rollout"):
            return self._tell_failures(self.loop.wait(self._begun.popleft()))

    def _draw(self, rows: list[Row], sampling: Sampling, phase: Callable) -> list[TrajectoryGroup]:
        """Draw the groups of some rows ``[P]`` with their rewards; ``phase(name)`` is a part's context."""
        with phase("rollout"):
            return self._tell_failures(self.loop.wait(self.loop.begin(rows, sampling, goes_first=True)))

    def _tell_failures(self, groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        scores = score_groups(groups, self.codec)
        if scores.failures:
            self.warn(scores.summarise())
        for note in dict.fromkeys(note for group in groups for one in group for note in one.notes):
            if note not in self._told:
                self._told.add(note)
                self.warn(note)
        return groups

    def _note_samples(self, groups: Sequence[TrajectoryGroup], version: int) -> None:
        """Take note of the lengths of samples, which are all of weights of ``version``, or as stale as they may be."""
        completions = [completion for group in groups for one in group for completion in one.completions]
        versions = {version for completion in completions for version, _ in completion.spans}
        stale = self.config.rollout.staleness
        if versions - set(range(version - stale, version + 1)):
            expected = f"{version - stale} to {version}" if stale else f"{version} alone"
            raise RunError(f"rollout: samples of weights {sorted(versions)}, expected version {expected}")
        if completions:
            mean = sum(len(completion.token_ids) for completion in completions) / len(completions)
            self.completion_tokens += _NEWEST_SHARE * (mean - self.completion_tokens)


def explain_empty_steps(step: int, count: int, reward: float) -> str:
    """Write the message that ends a run after ``count`` steps in a row, up to ``step``, had no group to learn from.

    Args:
        reward: mean reward of these steps.
    """
    return (
        f"step {step}: in {count} steps in a row no group had two different rewards (their mean is {reward:.3g}) and a "
        "sample, so that nothing was learned. Where all are wrong, take easier prompts or a reward that tells wrong "
        "from worse; where all are right, harder ones; or raise --samples-per-prompt or --algorithm.dynamic-sampling. "
        "Episodes that fail are reported above"
    )


def _explain_failures(scores: Scores) -> str:
    """Say why there is no use in going on where every episode of a step failed."""
    return (
        f"environment: {scores.summarise()}. A step without one reward teaches nothing. Mend the environment or reward "
        f"({ENVIRONMENT_LOG} has what it printed): let it give a number where a text is wrong, or raise "
        "--environment.time-limit-s where it had too little time. --resume goes on from the last step that was learned"
    )
