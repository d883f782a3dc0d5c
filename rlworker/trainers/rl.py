"""The controller of RL: one process that starts the engines and runs the steps."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from ray.actor import ActorHandle

from engines.batch.batch import TrainBatch
from engines.batch.shard import Outputs, get_logprobs, get_values, require_tokens
from engines.interfaces import LossFn
from rlworker.algorithms.advantages import AdvantageFn
from rlworker.algorithms.losses import Aggregation, token_mean
from rlworker.algorithms.objective import import_distillation, make_objective
from rlworker.base.errors import RunError
from rlworker.base.terminal import LOGGER, log_start
from rlworker.cluster.rollout_group import Rollouts
from rlworker.cluster.train_group import StartingGroup, WorkerGroup
from rlworker.cluster.watch import wait_for
from rlworker.cluster.workers import RolloutWorker
from rlworker.config.run import RunConfig
from rlworker.data.rows import Row, check_vocabulary, read_rows
from rlworker.environments.processes.pool import ENVIRONMENT_LOG, ProcessPool, pickle_environment
from rlworker.environments.reward import Environment, Scorer, make_environment
from rlworker.rollouts.manager import RolloutManager, explain_empty_steps
from rlworker.rollouts.running import make_codec, read_sources, running_loop, set_limits
from rlworker.rollouts.scoring import check_served, start_groups
from rlworker.rollouts.trajectory import batch_groups, replay_support
from rlworker.tracking.log import RL_LINE, StepClock
from rlworker.tracking.run_folder import FLOOR, RunFolder, Score
from rlworker.tracking.tracker import Tracker
from rlworker.trainers import step_metrics
from rlworker.trainers.agreement import SyncedWeights, check_agreement, compare_logprobs, describe_limits
from rlworker.trainers.canary import Canary
from rlworker.trainers.run import Run
from rlworker.trainers.run_processes import list_groups, list_warnings
from rlworker.trainers.shared_devices import SharedDevices
from rlworker.trainers.stop import Stop
from rlworker.validation.validate import validate

MAX_EMPTY_STEPS = 10
"""Number of steps in a row without a group to learn from that ends a run."""


class Trainer(Run[RunConfig]):
    """A run of rollouts and updates, used as ``Run`` says.

    Args:
        environment: ``async def environment(policy, row) -> Episode``, or a scorer, ``reward(text, row) -> float``.
        advantage: ``advantage(batch) -> [N]``, with a critic ``-> ([N], [N] returns)``.
        loss: ``loss(outputs, batch) -> (sum over tokens, metric sums)``, which an update minimises.
        aggregation: ``aggregation(batch) -> (weights [N], denominator)`` of an optimizer step. Of all three None takes
            the function of ``config.algorithm``, and keyword parameters that are named like settings get their values.
        folder, stop, trackers: as for ``Run``.

    Raises:
        ValueError: the settings, a model, the rows or the run folder cannot be used; nothing was started.
    """

    line = RL_LINE
    floor: float | None = None  # as of ``RunConfig.find_logprob_limits``, if limits need it

    def __init__(
        self,
        config: RunConfig,
        environment: Environment | Scorer,
        *,
        advantage: AdvantageFn | None = None,
        loss: LossFn | None = None,
        aggregation: Aggregation | None = None,
        folder: RunFolder | None = None,
        stop: Stop | None = None,
        trackers: Sequence[Tracker] = (),
    ):
        if config.evaluate:
            raise ValueError("config: evaluate is set, and Trainer only trains; leave --evaluate out, or call launch")
        super().__init__(config, folder, stop, trackers)
        self.score = Score(config.choose_metric(), +1)
        self.environment = make_environment(environment)
        pickle_environment(self.environment)  # refused here where it cannot be sent
        self.models = config.check_models(self.folder.inputs.find_model)
        self.served = check_served(config, self.folder.inputs.find_model)
        actor = self.models["actor"]
        self.codec = make_codec(config, actor)
        self.tokenizer, sets = self.codec.tokenizer, config.data.heldouts
        read = partial(read_rows, tokenizer=self.tokenizer, data=config.data, image_reader=self.codec.image_reader)
        train, self.curriculum = read_sources(config, read)
        heldout = [read(path) for path in sets.values()]
        self.rows, self.heldout = train.rows, dict(zip(sets, (each.rows for each in heldout), strict=True))
        held_out = [row for rows in self.heldout.values() for row in rows]
        every, sources = [*self.rows, *held_out], config.curriculum.weigh_sources(config.data.train)
        self.folder.inputs.hold(config.data, self.models, every, sources, config.actor.lora.start, self.served)
        if config.algorithm.distills:
            import_distillation().check_teachers(self.rows, config, self.models)
        check_vocabulary([row.prompt for row in every], [row.prompt_ids for row in every], actor.vocab)
        self.skipped = {"skipped_train": train.skipped, "skipped_heldout": sum(each.skipped for each in heldout)}
        log_start(f"rows are read: {len(self.rows)} to train on, {len(held_out)} held out")
        self.objective = make_objective(config, advantage, loss, aggregation)
        self.version = self.empty_steps = 0
        self.synced = SyncedWeights(config.rollout.dtype, bool(config.actor.lora.rank))
        self.starting_rollouts: Rollouts | None = None
        self.devices = SharedDevices()

    # -- engines

    def start_engines(self, clock: StepClock) -> None:
        """Start every engine at the same time. ``starting_rollouts`` are on their way already.

        Engines that share the trainers' devices start in processes that are there by then, once these are free.
        """
        config, trainers = self.config, []
        sizes = config.platform, config.rollout.engines, config.rollout.tp
        if config.placement.colocate:
            trainers = [self.start_processes(StartingGroup(*group)) for group in list_groups(config, self.models)]
            rollouts = self.start_processes(Rollouts(*sizes, trainers[0].list_device_slots))
            served = start_groups(self.served, config, self.start_processes, trainers[0].list_device_slots)
        else:
            rollouts = self.start_processes(self.starting_rollouts or Rollouts(*sizes))
            rollouts.start(self.models["actor"], config.rollout)  # before the trainers: vLLM takes longest
            served = start_groups(self.served, config, self.start_processes)
            trainers = [self.start_processes(StartingGroup(*group)) for group in list_groups(config, self.models)]
        with self._phase(clock, "start_trainers"):
            self.wait_for_trainers()
            if config.placement.colocate:
                self.devices.begin(rollouts)
                rollouts.start(self.models["actor"], config.rollout)
        log_start(f"trainer ranks are up: {sum(len(starting.workers) for starting in trainers)}")
        # While vLLM alone is still starting.
        processes = set_limits(config), config.environment.workers, self.folder.path / ENVIRONMENT_LOG
        pool = self.start_processes(ProcessPool(self.environment, self.codec, *processes))
        with self._phase(clock, "start_rollouts"):  # what they need beyond the trainers, beside which they start
            self.rollouts = rollouts.wait()
            for group in served.values():
                self.devices.wait_for_served(group)
        parts = self.environment, pool, self.rollouts, self.codec, served, self.devices.lend
        loop = self.running.enter_context(running_loop(config, *parts))
        if config.recovery.restarts:
            self.rollouts.replace_lost(self.note_lost, self.send_weights)
            for group in served.values():
                group.replace_engines(self.note_lost)
            loop.note_lost(self.outages.note_lost, config.recovery.stall_timeout_s)
        log_start(f"rollout engines are up: {len(self.rollouts.workers)}")
        parts = self.codec, self.rows, self.rollouts, loop, self._phase, self._warn, self.curriculum
        self.manager = RolloutManager(config, *parts, find_teaching=self.objective.find_teaching)
        if config.actor.lora.start:  # with which the actor began, and no rollout engine
            self.send_weights(self.rollouts.workers)
        if config.takes_floor:
            with self._phase(clock, "floor"):  # while all have the folder's weights: later ones could be stale
                measure = self.canary.measure_rounding if config.is_fp32 else self.canary.measure_floor
                self.floor = measure()

    def take_groups(self, groups: dict[str, WorkerGroup]) -> None:
        self.actor, self.critic = groups["actor"], groups.get("critic")
        self.references = {name: group.forward for name, group in groups.items() if name not in ("actor", "critic")}
        dedicated = self.config.placement.dedicated_devices
        self.devices.groups = {name: group for name, group in groups.items() if name not in dedicated}

    def begin(self) -> None:
        super().begin()
        LOGGER.info(describe_limits(self.config, self.floor))
        for warning in list_warnings(self.config, self.models["actor"]):
            LOGGER.warning(warning)

    def step(self) -> tuple[dict[str, float], list[dict]]:
        """Take one step, a rollout and its update, and return its metrics and some of its samples."""
        clock, version, first = StepClock(), self.version, self.manager.rollouts_done
        groups, metrics = self.manager.sample(clock, self.version)
        self.log.prompts(self.steps_done + 1, first, self.manager.list_row_numbers(first))
        if not groups:
            return self._count_empty_step(metrics, clock), []
        self.empty_steps = 0
        batch = batch_groups(groups, self.models["actor"].vision)
        batch = replay_support(batch) if self.config.rollout.top_k else batch
        if self.config.algorithm.samples_greedily:
            with self._phase(clock, "greedy"):
                rewards = self.manager.score_greedy([group[0].row for group in groups]).values
            batch = replace(batch, greedy_rewards=torch.tensor(rewards, dtype=torch.float32)[batch.group])
        with self._phase(clock, "logprobs"):
            batch = self._add_logprobs(batch, [group[0].row for group in groups])
        if self.critic:
            with self._phase(clock, "values"):
                batch = replace(batch, values=get_values(self.critic.forward(batch)))
        batch = self.objective.add_advantages(batch)
        if not batch.require_column("advantages")[batch.mask].any():
            if metrics["zero_variance_groups"] == metrics["groups"]:
                self._warn("no group has two different rewards: group-relative advantages are 0 in the next step")
            else:
                self._warn("every advantage is 0: the rewards teach nothing in the next step")
        with self._phase(clock, "update"):
            metrics |= self._update(batch)
        with self._phase(clock, "sync"):
            self.sync_weights()
        self.manager.run_ahead(self.config.steps - self.steps_done - 1)
        with self._phase(clock, "canary"):
            self.check_canary()
            metrics |= step_metrics.measure_memory(self.processes)
        self.steps_done += 1
        metrics |= step_metrics.measure_flops(self.models, batch, metrics | clock.seconds, self.config.actor)
        metrics |= step_metrics.list_limits(self.config, self.floor)
        metrics |= step_metrics.measure_batch(batch) | self.manager.measure_ahead(batch, version)
        return step_metrics.complete_step(metrics, version, clock.total()), self.manager.pick(groups)

    def _count_empty_step(self, metrics: dict[str, float], clock: StepClock) -> dict[str, float]:
        """Count a step that is left without a group, so that there is nothing to learn from: its metrics."""
        self.empty_steps += 1
        if self.empty_steps == MAX_EMPTY_STEPS:
            raise RunError(explain_empty_steps(self.steps_done + 1, MAX_EMPTY_STEPS, metrics["reward"]))
        self._warn("no group has two different rewards and a sample: the next step learns nothing")
        self.steps_done += 1
        return step_metrics.complete_step(metrics | {"empty_steps": self.empty_steps}, self.version, clock.total())

    def evaluate(self) -> dict[str, float]:
        """Return the mean greedy reward of each held-out set, and estimates from samples; empty without sets."""
        if not self.heldout:
            return {}
        clock = StepClock()
        with self._phase(clock, "evaluate"):
            validation = validate(self.manager, self.heldout)
        self.log.validation(self.steps_done, validation.table)
        return validation.metrics | clock.seconds

    # -- parts of a step

    @contextmanager
    def _phase(self, clock: StepClock, name: str) -> Iterator[None]:
        """Run a phase as ``Run`` does, after moving its tensors onto shared devices."""
        with super()._phase(clock, name):
            self.devices.take(name)
            yield

    def _warn(self, text: str) -> None:
        LOGGER.warning(f"after {self.steps_done} steps: {text}")

    def _add_logprobs(self, batch: TrainBatch, rows: Sequence[Row]) -> TrainBatch:
        """Add the logprobs of the rollout's weights and of the references that the update does not compute."""
        if self.config.algorithm.optimizer_steps > 1 or self._critic_warms_up:
            old = require_tokens(self.actor.forward(batch))
            batch = replace(batch, old_logprobs=old.logprobs, old_top_logprobs=old.top_logprobs)
        if not self.references:
            return batch
        return import_distillation().add_reference(batch, rows, self.config.distill, self.references)

    @property
    def _critic_warms_up(self) -> bool:
        return bool(self.critic) and self.steps_done < self.config.critic.warmup_steps

    def _update(self, batch: TrainBatch) -> dict[str, float]:
        """Take the optimizer steps of one rollout; the trainer's own logprobs must agree with the rollout's, and a
        policy that has moved too far in an epoch has no further one."""
        parts, logprobs, where = [], batch.old_logprobs, f"step {self.steps_done + 1}"
        if logprobs is not None:  # known before anything is learned from them
            check_agreement(self.config, self.floor, where, compare_logprobs(batch, logprobs, self.version))
        algorithm, limit, epochs = self.config.algorithm, self.config.limits.epoch_kl, 0
        # Episodes of which nothing was sampled may fill a mini-batch.
        minis = [mini for mini in batch.split(min(algorithm.mini_batches, batch.num_episodes)) if mini.mask.any()]
        while epochs < algorithm.epochs:
            epoch = [self._update_on(mini) for mini in minis]
            parts += [metrics for metrics, _ in epoch]
            epochs += 1
            if logprobs is None and (now := epoch[0][1]) is not None:
                logprobs = get_logprobs(now)
                check_agreement(self.config, self.floor, where, compare_logprobs(batch, logprobs, self.version))
            if limit and step_metrics.average(metrics for metrics, _ in epoch).get("policy_kl", 0.0) > limit:
                break
        means = step_metrics.average(parts)
        if algorithm.epochs > 1:
            means["epochs"] = epochs
        return means if logprobs is None else means | compare_logprobs(batch, logprobs, self.version)

    def _update_on(self, batch: TrainBatch) -> tuple[dict[str, float], Outputs | None]:
        """Take an optimizer step of the critic and one of the actor on a mini-batch.

        Returns:
            metrics; and the actor's outputs ``[N]`` from before, None where it does not learn yet.
        """
        metrics: dict[str, float] = {}
        if self.critic:
            of_critic, _ = self._update_group(self.critic, batch, self.objective.value_loss, token_mean)
            metrics |= {f"critic_{k}" if k in step_metrics.OF_ENGINE else k: value for k, value in of_critic.items()}
        if self._critic_warms_up:
            return metrics, None
        of_actor, outputs = self._update_group(self.actor, batch, self.objective.loss, self.objective.aggregation)
        return metrics | of_actor | step_metrics.measure_policy_kl(batch, get_logprobs(outputs)), outputs

    def _update_group(
        self, group: WorkerGroup, batch: TrainBatch, loss: LossFn, aggregation: Aggregation
    ) -> tuple[dict[str, float], Outputs]:
        """Take one optimizer step, tokens weighed by ``aggregation``; RunError where the gradient is not finite."""
        weights, denominator = aggregation(batch)
        batch = replace(batch, weights=weights)
        metrics, outputs = group.train_step(batch, loss, denominator)
        if math.isnan(metrics["grad_norm"]):
            self.reject_step(group.name, batch, outputs)
        return metrics, outputs

    def sync_weights(self) -> None:
        """Send the actor's weights to every rollout engine as ``version + 1``, and wait until the engines have them."""
        self.version += 1
        self.synced.send(self.actor, self.rollouts.workers, self.version)
        self.rollouts.check_version(self.version)  # engines that died meanwhile are noticed here

    def note_lost(self, lost: Mapping[str, str]) -> None:
        """Count an outage of rollout engines, which new engines replace now: ``{engine: how it was lost}``."""
        self.devices.free_devices()
        self.outages.note_lost(lost)

    def send_weights(self, engines: list[ActorHandle]) -> None:
        """Send the weights of the last sync to new engines that have just loaded the model, and compare them."""
        wait_for([engine.rewind.remote(self.version) for engine in engines])
        with self.devices.lending_weights():
            unlike = self.synced.send_to_new(self.actor, engines, self.version)
        check_agreement(self.config, self.floor, f"new engines, version {self.version}", {}, unlike)

    @property
    def canary(self) -> Canary:
        """The comparison of rollout engines and actor on fixed tokens."""
        longest = min(self.config.longest, self.config.rollout.max_model_len - 1)  # vLLM samples one more
        return Canary(self.actor, self.manager, self.models["actor"], self.rows, len(self.rollouts.workers), longest)

    def check_canary(self) -> None:
        """Check after a sync that every rollout engine has the weights that were sent, and agrees with the actor."""
        difference, unlike = self.canary.measure(), self.synced.compare(self.rollouts)
        check_agreement(self.config, self.floor, f"after sync {self.version}", difference, unlike)

    # -- checkpoints

    def get_state(self) -> dict[str, Any]:
        return {"version": self.version, "empty_steps": self.empty_steps, FLOOR: self.floor} | self.manager.get_state()

    def restore(self, state: dict) -> None:
        done = state["rollouts"], state["completion_tokens"], state["prompts"]
        self.manager.go_on(*done, state.get("curriculum"))
        self.empty_steps, self.floor = state["empty_steps"], state[FLOOR] or self.floor
        self.version = state["version"] - 1  # the sync makes it the version that the run had
        super().restore(state)
        # This program may have been further, or within an update.
        self.rollouts.call(RolloutWorker.rewind, self.version + 1)
        self.devices.take("sync")
        self.sync_weights()
        self.devices.take("canary")
        self.check_canary()

    def list_learners(self) -> list[WorkerGroup]:
        return [self.actor, self.critic] if self.critic else [self.actor]
