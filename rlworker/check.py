"""``rlworker check``: proof on this machine, of this model and at these parallel sizes, that the numbers are right.

Masks are probed for what they let through, layouts compared with each other and with HuggingFace, the rollout's
logprobs with the trainer's, before and after new weights are sent. Everything goes through the engines that train.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from ray.exceptions import RayError

from engines.batch import TrainBatch
from engines.interfaces import Sampling, TokenOutputs
from engines.models import ModelSpec
from hardware.capabilities import find_backend
from hardware.platform import describe, get_platform
from hardware.rules import CAUSAL, Rule
from rlworker.check_case import Case, make_case
from rlworker.check_config import CheckConfig
from rlworker.cluster import naming_failures, ray_for
from rlworker.data import Row
from rlworker.group import BUCKET_BYTES, StartingGroup, WorkerGroup
from rlworker.reference import Reference, huggingface_reference
from rlworker.rollout import logprob_difference, to_batch
from rlworker.rollout_engines import Rollouts
from rlworker.worker import Role

KINDS = ("bshd", "thd")
RULES = (CAUSAL, Rule(window=3), Rule(chunk=4), Rule(images=True), Rule(prefix=True), Rule(causal=False))
_PROBE = "engines.megatron.probe:"

LIMITS = {
    "float32": {"logprobs": 1e-4, "gradients": 1e-4, "layers": 1e-6, "rollout mean": 2e-5, "rollout max": 5e-3},
    "bfloat16": {"logprobs": 0.2, "gradients": 0.1, "layers": 1e-2, "rollout mean": 0.05, "rollout max": math.inf},
}
"""By the type of weights: largest difference of a logprob, ``|difference| / |gradient|`` of a tensor, what a layer adds
by rounding alone to the relative difference of a token's hidden state, mean and largest |rollout - trainer logprob|."""
_SCALE = 1.25
"""Weights are multiplied by this before they are sent: logprobs then move by far more than any limit."""
_JUMP = 5.0
"""A layer at which the difference grows by this factor is where it comes from."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: what was checked. where: layout, rule, engine.
        outcome: "refused" is the capability table's word: nothing was run, and nothing is wrong.
        text: what was found. evidence: what it shows (``Platform.evidence``), or "table".
    """

    check: str
    where: str
    outcome: Literal["ok", "FAILED", "refused"]
    text: str
    evidence: str


@dataclass(frozen=True)
class Bench:
    """The engines under check, and what they are checked with."""

    config: CheckConfig
    model: ModelSpec
    actor: WorkerGroup
    rollouts: Rollouts
    case: Case
    reference: Reference | None

    @property
    def limits(self) -> dict[str, float]:
        """Of the actor's type, and those of the rollout of the coarser of both."""
        actor, both = self.config.actor.dtype, {self.config.actor.dtype, self.config.rollout.dtype}
        rollout = LIMITS["float32" if both == {"float32"} else "bfloat16"]
        return LIMITS[actor] | {name: limit for name, limit in rollout.items() if name.startswith("rollout")}

    def on_ranks(self, function: str, *args) -> list:
        return self.actor.call("run", _PROBE + function, *args)

    def finding(self, check: str, where: str, passed: bool, text: str) -> Finding:
        return Finding(check, where, "ok" if passed else "FAILED", text, get_platform(self.config.platform).evidence)

    def limits_of_platform(self) -> list[Finding]:
        """What its evidence says nothing about, as the last line of the report."""
        platform = get_platform(self.config.platform)
        return [self.finding("platform", platform.name, True, describe(platform))] if platform.not_covered else []


@contextmanager
def bench(config: CheckConfig, rollouts: Rollouts | None = None) -> Iterator[Bench]:
    """Start the engines; HuggingFace computes beside them.

    Args:
        rollouts: engines that run already.
    """
    model = config.check_model()
    case = make_case(model, config.actor.dp)
    temperature = config.rollout.temperature
    with ExitStack() as running:
        if rollouts is None:
            running.enter_context(ray_for(config.actor.ranks + config.rollout.engines, config.platform))
            rollouts = Rollouts(config.platform, config.rollout.engines).start(model, config.rollout)
            running.callback(rollouts.stop)
        actor = StartingGroup("actor", config.platform, (Role("actor", model, config.actor, temperature),), seed=0)
        running.callback(actor.stop)
        reference = None
        if config.huggingface:
            reference = huggingface_reference(model.folder, case.batch, probe_loss, case.denominator, temperature)
        with naming_failures("check: start", actor.workers() | rollouts.workers()):
            engines = Bench(config, model, actor.ready()["actor"], rollouts.ready(), case, reference)
        yield engines


def run_check(config: CheckConfig) -> list[Finding]:
    """Start the engines, run every check once, end them."""
    with bench(config) as engines:
        return [*check_all(engines, version=1), *engines.limits_of_platform()]


def check_all(bench: Bench, version: int, only: str = "") -> list[Finding]:
    """Every check, in the order in which one explains the next. New weights are sent as ``version``.

    Args:
        only: the name of the one check to make.

    A worker that raises is a check that failed, and says what it raised. The others may still wait for it in a
    collective, so that nothing more is asked of several ranks after that.
    """
    found: list[Finding] = []
    for name, check in (
        ("attention", check_attention),
        ("tokens", check_tokens),
        ("layouts", check_layouts),
        ("gradients", check_gradients),
        ("rollout", check_rollout),
        ("weight sync", lambda bench: check_weight_sync(bench, version)),
    ):
        if only not in ("", name):
            continue
        try:
            found += check(bench)
        except RayError as error:
            text = f"raised: {str(error).strip().splitlines()[-1]}"
            if bench.config.actor.ranks > 1:
                return [*found, bench.finding(name, "", False, f"{text}; the checks after it were not run")]
            found.append(bench.finding(name, "", False, text))
    return found


# -- masks


def check_attention(bench: Bench) -> list[Finding]:
    """Every rule that the platform honours, through each layer's core attention."""
    found = []
    config = bench.config
    backends = get_platform(config.platform).attention_backends
    for kind in KINDS:
        for rule in dict.fromkeys((*RULES, *bench.model.rules)):
            try:
                find_backend(backends, kind, config.actor.cp, rule, config.actor.attention_override)
            except ValueError as error:
                found.append(Finding("attention", f"{kind}, {rule}", "refused", str(error), "table"))
                continue
            influences = list(chain(*bench.on_ranks("probe_attention", kind, rule, bench.case.probe)))
            found.append(bench.finding("attention", f"{kind}, {rule}", not influences, _in_words(influences)))
    return found


def check_tokens(bench: Bench) -> list[Finding]:
    """Who influences whom through the whole model, from token ids to the entropy of what is predicted."""
    found = []
    for kind in KINDS:
        influences = list(chain(*bench.on_ranks("probe_tokens", kind, bench.model.rules, bench.case.probe)))
        found.append(bench.finding("tokens", f"{kind}, whole model", not influences, _in_words(influences)))
    return found


def _in_words(influences: list) -> str:
    if not influences:
        return "no leak, no missing link"
    first = min(influences, key=lambda influence: influence.layer)
    parts = [f"{count} pairs see {kind}" for kind, count in first.leaks.items()]
    parts += [f"{first.missing} links missing"] if first.missing else []
    where = f"from layer {first.layer} on: " if first.layer else ""
    return f"{where}{', '.join(parts)}; {first.example}"


# -- numbers


def check_layouts(bench: Bench) -> list[Finding]:
    """Logprobs and entropies of both layouts against each other and against HuggingFace."""
    limit = bench.limits["logprobs"]
    outputs = {kind: _outputs(bench, kind) for kind in KINDS}
    found = []
    for kind in KINDS if bench.reference else ():
        apart = _largest(outputs[kind], TokenOutputs(bench.reference.logprobs, bench.reference.entropy))
        text = f"{apart:.1e}, limit {limit:.0e}"
        if not apart <= limit:
            text += f"; {first_difference(bench, kind)}"
        found.append(bench.finding("layouts", f"{kind} against HuggingFace", apart <= limit, text))
    apart = _largest(outputs["bshd"], outputs["thd"])
    return [*found, bench.finding("layouts", "bshd against thd", apart <= limit, f"{apart:.1e}, limit {limit:.0e}")]


def first_difference(bench: Bench, kind: str) -> str:
    """The first layer whose output is not HuggingFace's, in words."""
    states = {
        n: hidden for part in bench.on_ranks("hidden_states", kind, bench.case.batch) for n, hidden in part.items()
    }
    before = bench.limits["layers"]
    for number, want in sorted(bench.reference.hidden.items()):
        apart = float(((states[number] - want).norm(dim=1) / want.norm(dim=1)).max())
        if not apart <= _JUMP * before:
            return f"layer {number} of {len(states)} is the first to differ, by {apart:.1e} of a token's hidden state"
        before = max(before, apart)
    return f"all {len(states)} layers agree: what differs is the output layer or its targets"


def check_gradients(bench: Bench) -> list[Finding]:
    """Gradients of a loss that differs at every token, against HuggingFace; each tensor by its own norm."""
    found, limit = [], bench.limits["gradients"]
    for kind in KINDS if bench.reference else ():
        results = bench.on_ranks("gradients_of", kind, bench.case.batch, probe_loss, bench.case.denominator)
        gradients = next(part for part in results if part)
        apart = {
            name: float((gradients[name] - want).norm() / want.norm().clamp(min=1e-12))
            for name, want in bench.reference.gradients.items()
        }
        worst = max(apart, key=lambda name: math.inf if math.isnan(apart[name]) else apart[name])
        text = f"{apart[worst]:.1e} of the norm at most, in {worst}, limit {limit:.0e}"
        found.append(bench.finding("gradients", f"{kind} against HuggingFace", apart[worst] <= limit, text))
    return found


def probe_loss(outputs: TokenOutputs, batch: TrainBatch):
    """``-sum(advantage * logprob + 0.1 * entropy)`` over the tokens that count."""
    terms = -(batch.advantages * outputs.logprobs + 0.1 * outputs.entropy) * batch.mask
    return terms.sum(), {"loss": terms.sum().detach()}


# -- rollout


def check_rollout(bench: Bench) -> list[Finding]:
    """The rollout's logprobs of its own samples against the trainer's, at the weights that both have."""
    return _compare_rollouts(bench, "rollout", "against trainer")


def check_weight_sync(bench: Bench, version: int) -> list[Finding]:
    """Other weights are sent, and both must agree on samples of these; then the first weights come back."""
    before = _outputs(bench, bench.config.actor.layout)
    bench.on_ranks("scale_weights", _SCALE)
    try:
        moved = float((before.logprobs - _outputs(bench, bench.config.actor.layout).logprobs).abs().mean())
        send_weights(bench, version)
        found = _compare_rollouts(bench, "weight sync", "after new weights")
        if not moved > 5 * bench.limits["rollout mean"]:
            found.append(
                bench.finding("weight sync", "new weights", False, f"moved logprobs by {moved:.1e} on average")
            )
    finally:
        bench.on_ranks("restore_weights")
        send_weights(bench, version + 1)
    return found


def send_weights(bench: Bench, version: int) -> None:
    """The actor's weights to every rollout engine."""
    bench.actor.call("sync_weights", bench.rollouts.actors, version, BUCKET_BYTES)


def _compare_rollouts(bench: Bench, check: str, where: str) -> list[Finding]:
    """Each rollout engine's logprobs of its own samples against the trainer's."""
    config, engines = bench.config.rollout, len(bench.rollouts.actors)
    # Enough for every replica to have a share, and the same for every engine.
    rows = [Row("", prompt, "", {}) for prompt in bench.case.prompts] * (engines * bench.actor.dp_size)
    sampling = Sampling(2, config.temperature, config.max_new_tokens, seed=1, stop_token_ids=())
    batch = to_batch(rows, bench.rollouts.generate(rows, sampling), [0.0] * (2 * len(rows)))
    logprobs = bench.actor.forward(batch).logprobs
    found, start, limits = [], 0, (bench.limits["rollout mean"], bench.limits["rollout max"])
    for number, part in enumerate(batch.split(engines)):
        difference = logprob_difference(part, logprobs[start : start + part.num_tokens])
        start += part.num_tokens
        mean, largest = difference["logprob_diff_mean"], difference["logprob_diff_max"]
        text = f"mean {mean:.1e}, max {largest:.1e}, limits {limits[0]:.0e} and {limits[1]:.0e}"
        passed = mean <= limits[0] and largest <= limits[1]
        found.append(bench.finding(check, where if engines == 1 else f"{where}, engine {number}", passed, text))
    return found


def _outputs(bench: Bench, kind: str) -> TokenOutputs:
    """Outputs of the whole batch, which every replica computes."""
    outputs = bench.on_ranks("outputs_of", kind, bench.case.batch)
    return next(part for part, place in zip(outputs, bench.actor.places, strict=True) if place["is_leader"])


def _largest(a: TokenOutputs, b: TokenOutputs) -> float:
    """Largest difference of a logprob or an entropy; NaN where one is NaN or they are not equally many."""
    if a.logprobs.shape != b.logprobs.shape:
        return math.nan
    return max(float((x - y).abs().max()) for x, y in ((a.logprobs, b.logprobs), (a.entropy, b.entropy)))
