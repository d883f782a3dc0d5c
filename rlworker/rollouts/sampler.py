"""The sampler draws what a step learns from: prompts, completions of the current weights, their texts and rewards."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np

from engines.batch.batch import TrainBatch
from engines.batch.samples import Completions, Sampling
from engines.models.vision_spec import VisionSpec
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.workers import RolloutWorker
from rlworker.config.run import RunConfig
from rlworker.data.rows import Row, pick_rows
from rlworker.episodes.processes.pool import EPISODE_LOG
from rlworker.errors import NothingScored, RunError
from rlworker.rewards.pool import REWARD_LOG, RewardPool, Scores, join_scores
from rlworker.rollouts.metrics import SAMPLES_KEPT, pick_completions, summarise_groups
from rlworker.rollouts.plays import Player, batch_played, describe_episode, score_episodes, summarise_episodes
from rlworker.rollouts.scoring import score_completions
from rlworker.rollouts.stream.draw import Draw
from rlworker.rollouts.stream.stream import Stream
from rlworker.rollouts.to_batch import Group, batch_groups
from rlworker.tracking.log import StepClock

TRAINING, CANARY, STREAM = range(3)
"""Uses that completions are drawn for; each has random numbers of its own."""
_NEWEST_SHARE = 0.2
"""Share of a rollout in the running mean of the completions' lengths."""


class Sampler:
    """Draws prompts, samples and scores.

    Args:
        stop_token_ids: each ends a completion. rows: to draw from.
        scorer: rewards completions, or plays episodes.
        phase: ``phase(clock, name)``, the context in which a part of a step runs.
        warn: what to do with a line about rewards that failed.
        stream: draws ahead of the trainer; None where sampling and learning take turns.

    Attributes:
        rollouts_done: of training. completion_tokens: running mean of the completions' lengths, which says how long the
            next are expected to be. A checkpoint holds both and ``prompts_done``, which decide what is sampled next.
    """

    def __init__(
        self,
        config: RunConfig,
        tokenizer,
        stop_token_ids: tuple[int, ...],
        rows: list[Row],
        rollouts: Rollouts,
        scorer: RewardPool | Player,
        phase: Callable,
        warn: Callable[[str], None],
        stream: Stream | None = None,
    ):
        self.config, self.tokenizer, self.stop_token_ids, self.rows = config, tokenizer, stop_token_ids, rows
        self.rollouts, self.scorer, self.phase, self.warn = rollouts, scorer, phase, warn
        self.stream, self._begun, self._engines_idle_s = stream, deque[Draw](), 0.0
        self.rollouts_done = 0
        self._since, self._prompts_before = 0, 0
        self.completion_tokens = float(config.rollout.max_new_tokens)

    def sample(self, clock: StepClock, version: int) -> tuple[list, dict[str, float]]:
        """Draw the groups of a step, sampled by weights of ``version``, and metrics of all that were drawn for it.

        Groups are ``PromptGroup``, or ``EpisodeGroup`` where plays are drawn.

        With dynamic sampling, zero-variance groups are dropped, and those of further prompts take their
        place as far as these reach (DAPO, arXiv:2503.14476, section 3.2): fewer groups, or none, may be left. None are
        left either where nothing was sampled, as every play failed before: there is no token to learn from.

        Raises:
            NothingScored: the reward of every text failed.
        """
        config, further = self.config, self.config.algorithm.dynamic_sampling
        kept_groups, zero_variance, parts = [], [], []
        for _ in range(1 + further):
            groups, scores = self._draw_next(partial(self.phase, clock))
            self.rollouts_done += 1
            self._note_samples(groups, version)
            parts.append(scores)
            for group in groups:
                (zero_variance if further and group.has_zero_variance else kept_groups).append(group)
            if len(kept_groups) >= config.prompts_per_step:
                break
        scores = join_scores(parts)
        if scores.all_failed:
            self.rollouts_done -= len(parts)  # a run that goes on is asked the same once more
            raise NothingScored(self._explain_failures(scores))
        failures = scores.count_failures("episode" if self.plays else "reward")
        drawn_groups = kept_groups + zero_variance
        metrics = summarise_groups(drawn_groups) | (summarise_episodes(drawn_groups) if self.plays else {})
        groups = kept_groups[: config.prompts_per_step]
        return groups if any(group.completions.lengths.any() for group in groups) else [], metrics | failures

    def score_greedy(self, rows: list[Row]) -> Scores:
        """Find the rewards of the most likely completion of each row, or of the episode of most likely samples."""
        return self._draw(rows, replace(self.make_sampling(1), temperature=0.0), lambda _: nullcontext())[1]

    def complete(self, rows: list[Row], sampling: Sampling) -> Completions:
        """Sample a completion of each row that nobody scores, as many by each engine."""
        return self.stream.sample_each(rows, sampling) if self.stream else self.rollouts.generate(rows, sampling)

    def run_ahead(self, most: int) -> None:
        """Begin draws that the weights of now may sample: one, and as many as tokens may be updates older.

        Args:
            most: draws that the run can still take.
        """
        while self.stream and len(self._begun) < min(most, 1 + self.config.rollout.staleness):
            self._begun.append(self.stream.begin(*self._plan(self.rollouts_done + len(self._begun))))

    @property
    def prompts_done(self) -> int:
        """Prompts of all rollouts of training, which may have had different numbers of them."""
        return self._count_prompts(self.rollouts_done)

    def go_on(self, rollouts_done: int, completion_tokens: float, prompts_done: int | None) -> None:
        """Go on after so many rollouts; what was being drawn is forgotten, to be drawn again.

        Args:
            prompts_done: None where every rollout had as many as those to come.
        """
        self.rollouts_done, self.completion_tokens = rollouts_done, completion_tokens
        alike = rollouts_done * self.config.prompts_per_step
        self._since, self._prompts_before = rollouts_done, alike if prompts_done is None else prompts_done
        self._begun.clear()
        if self.stream:
            self.stream.forget((self.config.seed, rollouts_done, STREAM))

    def measure_ahead(self, batch: TrainBatch, version: int) -> dict[str, float]:
        """Measure how far rollouts run ahead: ages of a step's tokens in updates, how long trainers and engines had
        nothing to do, and what was being sampled at its update; nothing where they take turns."""
        if not self.stream:
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
        """List the numbers of the rows that were drawn from rollout ``first`` on."""
        draws = range(first, self.rollouts_done)
        return [number for draw in draws for number in self._pick_numbers(draw)]

    @property
    def plays(self) -> bool:
        """Tell whether episodes are drawn."""
        return isinstance(self.scorer, Player)

    def batch(self, groups: list, vision: VisionSpec | None) -> TrainBatch:
        """Batch groups that were drawn."""
        return batch_played(groups, vision) if self.plays else batch_groups(groups, vision)

    def pick(self, groups: list) -> list[dict]:
        """Pick a few of the groups that were drawn, as a run folder's ``rollouts`` has them."""
        if isinstance(self.scorer, Player):
            return [describe_episode(group.episodes[0], self.scorer.codec) for group in groups[:SAMPLES_KEPT]]
        return pick_completions(groups[:SAMPLES_KEPT])

    def make_sampling(self, count: int, use: int = TRAINING, draw: int | None = None) -> Sampling:
        """Say how ``count`` completions per prompt are drawn for the next rollout or for that of number ``draw``, or
        beside it for another ``use``."""
        number = self.rollouts_done if draw is None else draw
        rollout, stream = self.config.rollout, (self.config.seed, number, use)
        return Sampling(
            count,
            rollout.temperature,
            rollout.max_new_tokens,
            stream,
            self.stop_token_ids,
            expected_tokens=self.completion_tokens,
            top_logprobs=self.config.algorithm.score_centering if use == TRAINING else 0,
        )

    def _pick_numbers(self, draw: int) -> list[int]:
        config = self.config
        return pick_rows(range(len(self.rows)), config.prompts_per_step, self._count_prompts(draw), config.seed)

    def _count_prompts(self, draw: int) -> int:
        """Count the prompts of the rollouts before that of number ``draw``."""
        return self._prompts_before + (draw - self._since) * self.config.prompts_per_step

    def _plan(self, draw: int) -> tuple[list[Row], Sampling]:
        """Plan a rollout: its rows, and how completions of them are drawn."""
        rows = [self.rows[number] for number in self._pick_numbers(draw)]
        return rows, self.make_sampling(self.config.samples_per_prompt, draw=draw)

    def _draw_next(self, phase: Callable) -> tuple[list, Scores]:
        """Draw the groups of the next rollout, or wait for them where they were begun before."""
        if not self.stream:
            return self._draw(*self._plan(self.rollouts_done), phase)
        if not self._begun:
            self.run_ahead(1)
        with phase("rollout"):
            return self._tell_failures(*self.stream.wait(self._begun.popleft()))

    def _draw(self, rows: list[Row], sampling: Sampling, phase: Callable) -> tuple[list, Scores]:
        """Draw the groups of some rows ``[P]``, with their rewards ``[P * G]``; ``phase(name)`` is a part's context."""
        if self.stream:
            with phase("rollout"):
                return self._tell_failures(*self.stream.wait(self.stream.begin(rows, sampling, goes_first=True)))
        if isinstance(self.scorer, Player):
            with phase("rollout"):
                groups = self.scorer.play(rows, sampling)
            scores = score_episodes(groups)
        else:
            with phase("rollout"):
                completions = self.rollouts.generate(rows, sampling)
            with phase("reward"):
                groups, scores = score_completions(self.tokenizer, self.scorer, rows, completions)
        return self._tell_failures(groups, scores)

    def _explain_failures(self, scores: Scores) -> str:
        """Say why there is no use in going on where every text of a step failed."""
        what, section, log = ("play", "episodes", EPISODE_LOG) if self.plays else ("reward", "reward", REWARD_LOG)
        return (
            f"{what}: {scores.summarise()}. A step without one reward teaches nothing. Mend the {what} ({log} has what "
            f"it printed): let it give a number where a text is wrong, or raise --{section}.time-limit-s where it had "
            "too little time. What was learned before is saved: go on from it with --resume"
        )

    def _tell_failures(self, groups: list, scores: Scores) -> tuple[list, Scores]:
        if scores.failures:
            self.warn(scores.summarise())
        return groups, scores

    def _note_samples(self, groups: Sequence[Group], version: int) -> None:
        """Take note of the lengths of samples, which are all of weights of ``version``, or as stale as they may be."""
        versions = {int(each) for group in groups for each in np.unique(group.completions.span_versions)}
        stale = self.config.rollout.staleness
        if versions - set(range(version - stale, version + 1)):
            expected = f"{version - stale} to {version}" if stale else f"{version} alone"
            raise RunError(f"rollout: samples of weights {sorted(versions)}, expected version {expected}")
        lengths = [group.completions.lengths for group in groups]
        if count := sum(map(len, lengths)):
            mean = int(sum(each.sum() for each in lengths)) / count
            self.completion_tokens += _NEWEST_SHARE * (mean - self.completion_tokens)
