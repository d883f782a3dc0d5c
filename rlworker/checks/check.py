"""``rlworker check``: proof on this machine, of this model and at these parallel sizes, that the numbers are right.

Masks are probed for what they let through, layouts compared with each other and with HuggingFace, the rollout's
logprobs with the trainer's, before and after new weights are sent. Everything goes through the engines that train.
"""

import math
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from ray.exceptions import RayError

from engines.batch.samples import Sampling
from engines.batch.shard import TokenOutputs, get_logprobs
from hardware.attention.capabilities import find_backend
from hardware.attention.rules import CAUSAL, Rule
from hardware.platforms import get_platform
from rlworker.checks.config import CheckConfig
from rlworker.checks.context import CheckedEngines, Finding, list_platform_limits, start_engines
from rlworker.checks.huggingface import Reference, probe_loss
from rlworker.cluster.train_group import BUCKET_BYTES
from rlworker.data.rows import Row
from rlworker.rollouts.to_batch import compare_logprobs, to_batch

KINDS = ("bshd", "thd")
RULES = (CAUSAL, Rule(window=3), Rule(chunk=4), Rule(images=True), Rule(prefix=True), Rule(causal=False))
_SCALE = 1.25
"""Weights are multiplied by this before they are sent: logprobs then move by far more than any limit."""
_JUMP = 5.0
"""A layer at which the difference grows by this factor is where it comes from."""


def run_check(config: CheckConfig) -> list[Finding]:
    """Start the engines, run every check once, end them."""
    with start_engines(config) as engines:
        return [*check_all(engines, version=1), *list_platform_limits(get_platform(config.platform))]


def check_all(engines: CheckedEngines, version: int, only: str = "") -> list[Finding]:
    """Make every check, in the order in which one explains the next. New weights are sent as ``version``.

    Args:
        only: the name of the one check to make.

    A worker that raises is a check that failed, and says what it raised. The others may still wait for it in a
    collective, so that nothing more is asked of several ranks after that.
    """
    findings: list[Finding] = []
    for name, check in (
        ("attention", check_attention),
        ("tokens", check_tokens),
        ("images", check_images),
        ("layouts", check_layouts),
        ("gradients", check_gradients),
        ("rollout", check_rollout),
        ("weight sync", lambda engines: check_weight_sync(engines, version)),
    ):
        if only not in ("", name):
            continue
        try:
            findings += check(engines)
        except RayError as error:
            text = f"raised: {str(error).strip().splitlines()[-1]}"
            if engines.config.actor.ranks > 1:
                return [*findings, engines.make_finding(name, "", False, f"{text}; the checks after it were not run")]
            findings.append(engines.make_finding(name, "", False, text))
    return findings


# -- masks


def check_attention(engines: CheckedEngines) -> list[Finding]:
    """Check every rule that the platform honours, through each layer's core attention."""
    findings = []
    config = engines.config
    backends = get_platform(config.platform).attention_backends
    for kind in KINDS:
        for rule in dict.fromkeys((*RULES, *engines.model.rules)):
            try:
                find_backend(backends, kind, config.actor.cp, rule, config.actor.attention_override)
            except ValueError as error:
                findings.append(Finding("attention", f"{kind}, {rule}", "refused", str(error), "table"))
                continue
            influences = list(chain(*engines.call_ranks("probe_attention", kind, rule, engines.case.probe)))
            findings.append(
                engines.make_finding("attention", f"{kind}, {rule}", not influences, _describe_influences(influences))
            )
    return findings


def check_tokens(engines: CheckedEngines) -> list[Finding]:
    """Check who influences whom through the whole model, from token ids to the entropy of what is predicted."""
    findings = []
    for kind in KINDS:
        influences = list(chain(*engines.call_ranks("probe_tokens", kind, engines.model.rules, engines.case.probe)))
        findings.append(
            engines.make_finding("tokens", f"{kind}, whole model", not influences, _describe_influences(influences))
        )
    return findings


def check_images(engines: CheckedEngines) -> list[Finding]:
    """Check who influences whom from pixels on: another image moves what comes from its first token on, in its own
    sequence and nowhere else; and within the tower nothing of the images beside it."""
    findings, batch, others = [], engines.case.batch, engines.case.others
    if not others:
        return []
    starts, shown, image_block = np.cumsum([0, *batch.lengths]), batch.images or (), batch.require_column("image_block")
    for kind in KINDS:
        before, leaks, missing = engines.compute_outputs(kind), 0, 0
        for image, other in others.items():  # wherever it is: as many images are then seen, split in the same way
            images = tuple(tuple(other if one == image else one for one in own) for own in shown)
            after = engines.compute_outputs(kind, replace(batch, images=images))
            heard = (before.entropy != after.entropy) | (before.logprobs != after.logprobs)
            sees = torch.zeros(batch.num_tokens, dtype=torch.bool)
            for row, own in enumerate(shown):
                if image in own:
                    blocks = image_block[starts[row] : starts[row + 1]]
                    sees[starts[row] + int((blocks == own.index(image)).nonzero()[0]) : starts[row + 1]] = True
            leaks, missing = leaks + int((heard & ~sees).sum()), missing + int((sees & ~heard).sum())
        words = f"{leaks} tokens see an image that they must not, {missing} do not see their own"
        passed = not leaks and not missing
        findings.append(engines.make_finding("images", f"{kind}, whole model", passed, "no leak" if passed else words))
    images = list(others)
    leaks = sum(engines.call_ranks("probe_tower", images, [others[image] for image in images]))
    text = f"{leaks} images see another in the tower" if leaks else "no leak"
    return [*findings, engines.make_finding("images", "tower", not leaks, text)]


def _describe_influences(influences: list) -> str:
    if not influences:
        return "no leak, no missing link"
    first = min(influences, key=lambda influence: influence.layer)
    parts = [f"{count} pairs see {kind}" for kind, count in first.leaks.items()]
    parts += [f"{first.missing} links missing"] if first.missing else []
    where = f"from layer {first.layer} on: " if first.layer else ""
    return f"{where}{', '.join(parts)}; {first.example}"


# -- numbers


def check_layouts(engines: CheckedEngines) -> list[Finding]:
    """Check logprobs and entropies of both layouts against each other and against HuggingFace."""
    limit = engines.limits["logprobs"]
    outputs = {kind: engines.compute_outputs(kind) for kind in KINDS}
    findings = []
    for kind, reference in engines.list_comparisons(KINDS):
        distance = _find_largest(outputs[kind], TokenOutputs(reference.logprobs, reference.entropy))
        text = f"{distance:.1e}, limit {limit:.0e}"
        if not distance <= limit:
            text += f"; {find_first_difference(engines, kind, reference)}"
        findings.append(engines.make_finding("layouts", f"{kind} against HuggingFace", distance <= limit, text))
    distance = _find_largest(outputs["bshd"], outputs["thd"])
    return [
        *findings,
        engines.make_finding("layouts", "bshd against thd", distance <= limit, f"{distance:.1e}, limit {limit:.0e}"),
    ]


def find_first_difference(engines: CheckedEngines, kind: str, reference: Reference) -> str:
    """Name the first layer whose output is not HuggingFace's, in words."""
    states = {
        n: hidden
        for part in engines.call_ranks("hidden_states", kind, engines.case.batch)
        for n, hidden in part.items()
    }
    before = engines.limits["layers"]
    for number, want in sorted(reference.hidden.items()):
        apart = float(((states[number] - want).norm(dim=1) / want.norm(dim=1)).max())
        if not apart <= _JUMP * before:
            return f"layer {number} of {len(states)} is the first to differ, by {apart:.1e} of a token's hidden state"
        before = max(before, apart)
    return f"all {len(states)} layers agree: what differs is the output layer or its targets"


def check_gradients(engines: CheckedEngines) -> list[Finding]:
    """Check gradients of a loss that differs at every token, against HuggingFace; each tensor by its own norm."""
    findings, limit = [], engines.limits["gradients"]
    for kind, reference in engines.list_comparisons(KINDS):
        results = engines.call_ranks(
            "compute_gradients", kind, engines.case.batch, probe_loss, engines.case.denominator
        )
        gradients = next(part for part in results if part)
        apart = {
            name: float((gradients[name] - want).norm() / want.norm().clamp(min=1e-12))
            for name, want in reference.gradients.items()
            if engines.model.find_part(name) not in engines.config.actor.freeze
        }
        worst = max(apart, key=lambda name: math.inf if math.isnan(apart[name]) else apart[name])
        text = f"{apart[worst]:.1e} of the norm at most, in {worst}, limit {limit:.0e}"
        findings.append(engines.make_finding("gradients", f"{kind} against HuggingFace", apart[worst] <= limit, text))
    return findings


# -- rollout


def check_rollout(engines: CheckedEngines) -> list[Finding]:
    """Check the rollout's logprobs of its own samples against the trainer's, at the weights that both have."""
    return _compare_rollouts(engines, "rollout", "against trainer")


def check_weight_sync(engines: CheckedEngines, version: int) -> list[Finding]:
    """Send other weights, on whose samples both must agree; then the first weights come back."""
    before = engines.compute_outputs(engines.config.actor.layout)
    engines.call_ranks("scale_weights", _SCALE)
    try:
        moved = float((before.logprobs - engines.compute_outputs(engines.config.actor.layout).logprobs).abs().mean())
        send_weights(engines, version)
        findings = _compare_rollouts(engines, "weight sync", "after new weights")
        if not moved > 5 * engines.limits["rollout mean"]:
            findings.append(
                engines.make_finding("weight sync", "new weights", False, f"moved logprobs by {moved:.1e} on average")
            )
    finally:
        engines.call_ranks("restore_weights")
        send_weights(engines, version + 1)
    return findings


def send_weights(engines: CheckedEngines, version: int) -> None:
    """Send the actor's weights to every rollout engine."""
    engines.actor.call("sync_weights", engines.rollouts.workers, version, BUCKET_BYTES)


def _compare_rollouts(engines: CheckedEngines, check: str, where: str) -> list[Finding]:
    """Compare each rollout engine's logprobs of its own samples against the trainer's."""
    config, count = engines.config.rollout, len(engines.rollouts.workers)
    # Enough for every replica to have a share, and the same for every engine.
    rows = [Row("", p.token_ids, "", {}, p.images) for p in engines.case.prompts] * (count * engines.actor.dp_size)
    sampling = Sampling(2, config.temperature, config.max_new_tokens, stream=(1,), stop_token_ids=())
    batch = to_batch(rows, engines.rollouts.generate(rows, sampling), [0.0] * (2 * len(rows)), engines.model.vision)
    logprobs = get_logprobs(engines.actor.forward(batch))
    findings, start, limits = [], 0, (engines.limits["rollout mean"], engines.limits["rollout max"])
    for number, part in enumerate(batch.split(count)):
        difference = compare_logprobs(part, logprobs[start : start + part.num_tokens])
        start += part.num_tokens
        mean, largest = difference["logprob_diff_mean"], difference["logprob_diff_max"]
        text = f"mean {mean:.1e}, max {largest:.1e}, limits {limits[0]:.0e} and {limits[1]:.0e}"
        if "logprob_diff_pictures_max" in difference:
            text += "; after images mean {logprob_diff_pictures_mean:.1e}, max {logprob_diff_pictures_max:.1e}".format(
                **difference
            )
        passed = mean <= limits[0] and largest <= limits[1]
        findings.append(engines.make_finding(check, where if count == 1 else f"{where}, engine {number}", passed, text))
    return findings


def _find_largest(a: TokenOutputs, b: TokenOutputs) -> float:
    """Find the largest difference of a logprob or an entropy; NaN where one is NaN or they are not equally many."""
    if a.logprobs.shape != b.logprobs.shape:
        return math.nan
    return max(float((x - y).abs().max()) for x, y in ((a.logprobs, b.logprobs), (a.entropy, b.entropy)))
