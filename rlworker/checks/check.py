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
from engines.batch.shard import TokenOutputs
from hardware.attention.capabilities import find_backend
from hardware.attention.rules import CAUSAL, Rule
from hardware.platforms import get_platform
from rlworker.checks.config import CheckConfig
from rlworker.checks.context import Bench, Finding, bench, list_platform_limits
from rlworker.checks.huggingface import probe_loss
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
    with bench(config) as engines:
        return [*check_all(engines, version=1), *list_platform_limits(get_platform(config.platform))]


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
        ("images", check_images),
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


def check_images(bench: Bench) -> list[Finding]:
    """Who influences whom from pixels on: another image moves what comes from its first token on, in its own sequence
    and nowhere else; and within the tower nothing of the images beside it."""
    found, batch, others = [], bench.case.batch, bench.case.others
    if not others:
        return []
    starts = np.cumsum([0, *batch.lengths])
    for kind in KINDS:
        before, leaks, missing = bench.outputs(kind), 0, 0
        for image, other in others.items():  # wherever it is: as many images are then seen, split in the same way
            images = tuple(tuple(other if one == image else one for one in own) for own in batch.images)
            after = bench.outputs(kind, replace(batch, images=images))
            heard = (before.entropy != after.entropy) | (before.logprobs != after.logprobs)
            sees = torch.zeros(batch.num_tokens, dtype=torch.bool)
            for row, own in enumerate(batch.images):
                if image in own:
                    blocks = batch.image_block[starts[row] : starts[row + 1]]
                    sees[starts[row] + int((blocks == own.index(image)).nonzero()[0]) : starts[row + 1]] = True
            leaks, missing = leaks + int((heard & ~sees).sum()), missing + int((sees & ~heard).sum())
        words = f"{leaks} tokens see an image that they must not, {missing} do not see their own"
        passed = not leaks and not missing
        found.append(bench.finding("images", f"{kind}, whole model", passed, "no leak" if passed else words))
    images = list(others)
    seen = sum(bench.on_ranks("probe_tower", images, [others[image] for image in images]))
    text = f"{seen} images see another in the tower" if seen else "no leak"
    return [*found, bench.finding("images", "tower", not seen, text)]


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
    outputs = {kind: bench.outputs(kind) for kind in KINDS}
    found = []
    for kind in KINDS if bench.reference else ():
        apart = _largest(outputs[kind], TokenOutputs(bench.reference.logprobs, bench.reference.entropy))
        text = f"{apart:.1e}, limit {limit:.0e}"
        if not apart <= limit:
            text += f"; {find_first_difference(bench, kind)}"
        found.append(bench.finding("layouts", f"{kind} against HuggingFace", apart <= limit, text))
    apart = _largest(outputs["bshd"], outputs["thd"])
    return [*found, bench.finding("layouts", "bshd against thd", apart <= limit, f"{apart:.1e}, limit {limit:.0e}")]


def find_first_difference(bench: Bench, kind: str) -> str:
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
        results = bench.on_ranks("compute_gradients", kind, bench.case.batch, probe_loss, bench.case.denominator)
        gradients = next(part for part in results if part)
        apart = {
            name: float((gradients[name] - want).norm() / want.norm().clamp(min=1e-12))
            for name, want in bench.reference.gradients.items()
            if bench.model.find_part(name) not in bench.config.actor.freeze
        }
        worst = max(apart, key=lambda name: math.inf if math.isnan(apart[name]) else apart[name])
        text = f"{apart[worst]:.1e} of the norm at most, in {worst}, limit {limit:.0e}"
        found.append(bench.finding("gradients", f"{kind} against HuggingFace", apart[worst] <= limit, text))
    return found


# -- rollout


def check_rollout(bench: Bench) -> list[Finding]:
    """The rollout's logprobs of its own samples against the trainer's, at the weights that both have."""
    return _compare_rollouts(bench, "rollout", "against trainer")


def check_weight_sync(bench: Bench, version: int) -> list[Finding]:
    """Other weights are sent, and both must agree on samples of these; then the first weights come back."""
    before = bench.outputs(bench.config.actor.layout)
    bench.on_ranks("scale_weights", _SCALE)
    try:
        moved = float((before.logprobs - bench.outputs(bench.config.actor.layout).logprobs).abs().mean())
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
    bench.actor.call("sync_weights", bench.rollouts.workers, version, BUCKET_BYTES)


def _compare_rollouts(bench: Bench, check: str, where: str) -> list[Finding]:
    """Each rollout engine's logprobs of its own samples against the trainer's."""
    config, engines = bench.config.rollout, len(bench.rollouts.workers)
    # Enough for every replica to have a share, and the same for every engine.
    rows = [Row("", p.token_ids, "", {}, p.images) for p in bench.case.prompts] * (engines * bench.actor.dp_size)
    sampling = Sampling(2, config.temperature, config.max_new_tokens, stream=(1,), stop_token_ids=())
    batch = to_batch(rows, bench.rollouts.generate(rows, sampling), [0.0] * (2 * len(rows)), bench.model.vision)
    logprobs = bench.actor.forward(batch).logprobs
    found, start, limits = [], 0, (bench.limits["rollout mean"], bench.limits["rollout max"])
    for number, part in enumerate(batch.split(engines)):
        difference = compare_logprobs(part, logprobs[start : start + part.num_tokens])
        start += part.num_tokens
        mean, largest = difference["logprob_diff_mean"], difference["logprob_diff_max"]
        text = f"mean {mean:.1e}, max {largest:.1e}, limits {limits[0]:.0e} and {limits[1]:.0e}"
        if "logprob_diff_pictures_max" in difference:
            text += "; after images mean {logprob_diff_pictures_mean:.1e}, max {logprob_diff_pictures_max:.1e}".format(
                **difference
            )
        passed = mean <= limits[0] and largest <= limits[1]
        found.append(bench.finding(check, where if engines == 1 else f"{where}, engine {number}", passed, text))
    return found


def _largest(a: TokenOutputs, b: TokenOutputs) -> float:
    """Largest difference of a logprob or an entropy; NaN where one is NaN or they are not equally many."""
    if a.logprobs.shape != b.logprobs.shape:
        return math.nan
    return max(float((x - y).abs().max()) for x, y in ((a.logprobs, b.logprobs), (a.entropy, b.entropy)))
