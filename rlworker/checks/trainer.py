"""Checks of a training engine's masks, layouts and gradients.

Nothing here needs Ray or a rollout engine: ``rlworker check`` runs these checks on ranks that it starts, and
``scripts/device_check.py`` in its own process.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from engines.batch.batch import TrainBatch
from engines.batch.shard import TokenOutputs
from engines.config import MegatronConfig
from engines.models.spec import ModelSpec
from hardware.attention.capabilities import find_backend
from hardware.attention.mask_spec import LayoutKind
from hardware.attention.rules import CAUSAL, Rule
from hardware.platform import Platform, describe
from hardware.platforms import get_platform
from rlworker.base.findings import Finding
from rlworker.checks.case import Case
from rlworker.checks.reference.ensemble import Reference
from rlworker.checks.reference.huggingface import compare_outputs, probe_loss

KINDS: tuple[LayoutKind, ...] = ("bshd", "thd")
RULES = (
    CAUSAL,
    Rule(window=3),
    Rule(chunk=4),
    Rule(images=True),
    Rule(images=True, window=3),
    Rule(prefix=True),
    Rule(causal=False),
)
"""Rules to probe with; one of the images is longer than the window."""
_JUMP = 5.0
"""Factor by which the difference grows at the layer that causes it."""
FACTORS = {"mean": 2.0, "p99": 2.0, "max": 4.0}
"""Statistic -> most that our distance from float64 may be, as a multiple of ``Rounding``'s. One token makes the largest
difference: it varies by a factor of about 2 from draw to draw, mean and percentile by a tenth."""
GRADIENT_FACTORS = {"float32": 4.0, "bfloat16": 2.0}
"""dtype -> the same multiple for gradients."""
_LEAST_APART = 8 * torch.finfo(torch.float32).eps
"""Share of a gradient's norm by which any two sums in float32 differ: our limit is higher by this."""
_GRADIENTS_AT_ONCE = 2**26
"""Number of gradient elements that ranks return at a time."""
LIMITS = {
    "float32": {"logprobs": 1e-4, "gradients": 1e-4, "layers": 1e-6, "rollout": (2e-5, 1e-5, 5e-3)},
    "bfloat16": {"logprobs": 0.2, "gradients": 0.1, "layers": 1e-2, "rollout": (0.05, math.inf, math.inf)},
}
"""Limits by the type of weights, for models without a measured rounding: the largest difference of a logprob,
``|difference| / |gradient|`` of a tensor, and the relative difference that one layer's rounding adds to a token's
hidden state. For rollout - trainer logprobs: the mean absolute difference, the absolute mean, and the largest. Rounding
has both signs, so the absolute mean finds a bias."""


@dataclass(frozen=True)
class CheckedTrainer:
    """A training engine under check, with the sequences and references of the check.

    Attributes:
        platform: name of the platform. settings: settings of the engine. model: the model.
        case: the sequences. reference: HuggingFace's numbers; None without them.
        call_ranks: ``call_ranks(name, *args)`` calls a function of ``engines.probes.megatron`` on every rank and
            returns the result of each rank.
        ends_early: whether to stop probing masks at the first rule with a wrong mask. A wrong mask may cover a whole
            pack, which takes quadratic time.
        tell: is called with a line of text at the start of each part.
    """

    platform: str
    settings: MegatronConfig
    model: ModelSpec
    case: Case
    reference: Reference | None
    call_ranks: Callable[..., list]
    ends_early: bool = False
    tell: Callable[[str], None] = lambda line: None

    @property
    def limits(self) -> dict[str, Any]:
        """Limits of differences for the engine's dtype, from ``LIMITS``."""
        return LIMITS[self.settings.dtype]

    @property
    def kinds(self) -> tuple[LayoutKind, ...]:
        """The layouts in which the platform can compute all rules of the model."""
        return list_kinds(self.platform, self.settings, self.model)

    def list_comparisons(self) -> list[tuple[str, Reference]]:
        """List the layouts to compare with HuggingFace, each with HuggingFace's numbers; empty without them."""
        return [(kind, self.reference) for kind in self.kinds if self.reference]

    def compute_outputs(self, kind: str, batch: TrainBatch | None = None) -> TokenOutputs:
        """Compute the outputs of ``batch``, or of the case's batch, in layout ``kind``. Every replica computes all."""
        outputs = self.call_ranks("compute_outputs", kind, batch or self.case.batch)
        return next(part for part in outputs if part is not None)

    def make_finding(self, check: str, where: str, passed: bool, text: str) -> Finding:
        """Return a row of the report, with the platform's level of proof as evidence."""
        return Finding(check, where, "ok" if passed else "FAILED", text, get_platform(self.platform).evidence)


def list_kinds(platform: str, settings: MegatronConfig, model: ModelSpec) -> tuple[LayoutKind, ...]:
    """List the layouts in which a platform can compute every rule of a model."""
    backends, kinds = get_platform(platform).attention_backends, []
    for kind in KINDS:
        with suppress(ValueError):
            for rule in set(model.rules):
                find_backend(backends, kind, settings.cp, rule, settings.attention_override)
            kinds.append(kind)
    return tuple(kinds)


def list_platform_limits(platform: Platform) -> list[Finding]:
    """Return the last row of the report, which names what the platform does not cover; empty if nothing."""
    covered = Finding("platform", platform.name, "ok", describe(platform), platform.evidence)
    return [covered] if platform.not_covered else []


# -- masks


def check_attention(trainer: CheckedTrainer) -> list[Finding]:
    """Check every rule that the platform supports, through each layer's core attention."""
    findings = []
    backends = get_platform(trainer.platform).attention_backends
    for kind in KINDS:
        for rule in dict.fromkeys((*RULES, *trainer.model.rules)):
            try:
                find_backend(backends, kind, trainer.settings.cp, rule, trainer.settings.attention_override)
            except ValueError as error:
                findings.append(Finding("attention", f"{kind}, {rule}", "refused", str(error), "table"))
                continue
            trainer.tell(f"attention: {kind}, {rule}")
            is_own = rule in trainer.model.rules  # others are the platform's, alike in all layers
            is_long = is_own and (rule.window or rule.state)
            probe = trainer.case.window_probe if is_long else trainer.case.probe
            influences = list(chain(*trainer.call_ranks("probe_attention", kind, rule, probe, is_own)))
            findings.append(
                trainer.make_finding("attention", f"{kind}, {rule}", not influences, _describe_influences(influences))
            )
            if influences and trainer.ends_early:
                return findings
    return findings


def check_tokens(trainer: CheckedTrainer) -> list[Finding]:
    """Check which tokens influence each other through the whole model, from token ids to entropies."""
    findings = []
    leak_limit = _find_leak_limit(trainer)
    for kind in trainer.kinds:
        trainer.tell(f"tokens: {kind}")
        probe = trainer.case.token_probe
        influences = list(chain(*trainer.call_ranks("probe_tokens", kind, trainer.model.rules, probe, leak_limit)))
        findings.append(
            trainer.make_finding("tokens", f"{kind}, whole model", not influences, _describe_influences(influences))
        )
    return findings


def check_images(trainer: CheckedTrainer) -> list[Finding]:
    """Check the influence of pixels: another image changes outputs from its first token on, in its own sequence alone.

    In the vision tower it must not change the features of other images. Where a model has experts, the rows of their
    products change places with the routes of other tokens, and are rounded otherwise: a leak is beyond rounding there.
    """
    findings, batch, others = [], trainer.case.batch, trainer.case.others
    if not others:
        return []
    starts, shown, image_block = np.cumsum([0, *batch.lengths]), batch.images or (), batch.require_column("image_block")
    leak_limit = _find_leak_limit(trainer)
    for kind in trainer.kinds:
        trainer.tell(f"images: {kind}")
        before, leaks, missing = trainer.compute_outputs(kind), 0, 0
        for image, other in others.items():  # wherever it is: as many images are then seen, split in the same way
            images = tuple(tuple(other if one == image else one for one in own) for own in shown)
            after = trainer.compute_outputs(kind, replace(batch, images=images))
            heard = (before.entropy != after.entropy) | (before.logprobs != after.logprobs)
            moved = torch.maximum((before.entropy - after.entropy).abs(), (before.logprobs - after.logprobs).abs())
            is_beyond_rounding = ~(moved <= leak_limit)  # a NaN is
            sees = torch.zeros(batch.num_tokens, dtype=torch.bool)
            for row, own in enumerate(shown):
                if image in own:
                    blocks = image_block[starts[row] : starts[row + 1]]
                    sees[starts[row] + int((blocks == own.index(image)).nonzero()[0]) : starts[row + 1]] = True
            leaks += int((heard & is_beyond_rounding & ~sees).sum())
            missing += int((sees & ~heard).sum())
        words = f"{leaks} tokens see an image that they must not, {missing} do not see their own"
        passed = not leaks and not missing
        findings.append(trainer.make_finding("images", f"{kind}, whole model", passed, "no leak" if passed else words))
    images = list(others)
    leaks = sum(trainer.call_ranks("probe_tower", images, [others[image] for image in images]))
    text = f"{leaks} images see another in the tower" if leaks else "no leak"
    return [*findings, trainer.make_finding("images", "tower", not leaks, text)]


def _find_leak_limit(trainer: CheckedTrainer) -> float:
    """Find by how much rounding alone may change an output where other tokens are others: 0 without experts."""
    if not trainer.model.experts:
        return 0.0
    if trainer.reference and trainer.reference.rounding:
        return FACTORS["max"] * trainer.reference.rounding.outputs["logprob max"]
    return trainer.limits["logprobs"]


def _describe_influences(influences: list) -> str:
    if not influences:
        return "no leak, no missing link"
    first = min(influences, key=lambda influence: influence.layer)
    parts = [f"{count} pairs see {kind}" for kind, count in first.leaks.items()]
    parts += [f"{first.missing} links missing"] if first.missing else []
    where = f"from layer {first.layer} on: " if first.layer else ""
    return f"{where}{', '.join(parts)}; {first.example}"


# -- numbers


def check_layouts(trainer: CheckedTrainer) -> list[Finding]:
    """Check logprobs and entropies of both layouts against HuggingFace and against each other."""
    outputs, findings = {}, []
    for kind in trainer.kinds:
        trainer.tell(f"layouts: {kind}")
        outputs[kind] = trainer.compute_outputs(kind)
    for kind, reference in trainer.list_comparisons():
        passed, text = judge_outputs(trainer, reference.compare_outputs(outputs[kind]))
        if not passed:
            text += f"; {find_first_difference(trainer, kind, reference)}"
        findings.append(trainer.make_finding("layouts", f"{kind} against HuggingFace", passed, text))
    if len(outputs) == len(KINDS):
        found = compare_outputs(outputs["bshd"], outputs["thd"])
        findings.append(trainer.make_finding("layouts", "bshd against thd", *judge_outputs(trainer, found)))
    return findings


def judge_outputs(trainer: CheckedTrainer, found: dict[str, float]) -> tuple[bool, str]:
    """Judge the differences of ``compare_outputs`` by HuggingFace's own rounding: whether they pass, and a text."""
    if not (trainer.reference and trainer.reference.rounding):
        limit = trainer.limits["logprobs"]
        over = [value for value in found.values() if not value <= limit]
        return not over, f"{(over or [max(found.values())])[0]:.1e}, limit {limit:.0e}, estimated"
    own = trainer.reference.rounding.outputs
    limits = {name: FACTORS[name.split()[-1]] * value for name, value in own.items()}
    over = [name for name, value in found.items() if not value <= limits[name]]
    shown = over or ["logprob mean", "logprob p99", "logprob max"]
    text = [f"{name} {found[name]:.1e} (HuggingFace {own[name]:.1e}, limit {limits[name]:.1e})" for name in shown]
    return not over, ", ".join(text)


def find_first_difference(trainer: CheckedTrainer, kind: str, reference: Reference) -> str:
    """Describe the first layer whose output differs from HuggingFace's."""
    states = {
        n: hidden
        for part in trainer.call_ranks("hidden_states", kind, trainer.case.batch)
        for n, hidden in part.items()
    }
    before, count = trainer.limits["layers"], len(reference.hidden)
    for number in sorted(reference.hidden):
        apart = reference.compare_hidden(number, states[number])
        own = reference.rounding.hidden[number] if reference.rounding else 0.0
        if not apart <= _JUMP * max(before, own):
            return f"layer {number} of {count} is the first to differ, by {apart:.1e} of a token's hidden state"
        before = max(before, apart)
    return f"all {count} layers agree: what differs is the output layer or its targets"


def check_gradients(trainer: CheckedTrainer) -> list[Finding]:
    """Check the gradients of ``probe_loss`` against HuggingFace, each tensor relative to its norm, and that each token
    chose experts once."""
    findings = []
    for kind, reference in trainer.list_comparisons():
        trainer.tell(f"gradients: {kind}")
        trainer.call_ranks("take_gradients", kind, trainer.case.batch, probe_loss, trainer.case.denominator)
        apart: dict[str, float] = {}
        for names in _cut_names(trainer, reference):
            gradients = next(part for part in trainer.call_ranks("read_gradients", names) if part)
            apart |= {name: reference.compare_gradient(name, gradients[name]) for name in names}
        worst = max(apart, key=lambda name: math.inf if math.isnan(apart[name]) else apart[name])
        text = f"{apart[worst]:.1e} of the norm at most, in {worst}"
        if reference.rounding:
            own = reference.rounding.gradient
            limit = GRADIENT_FACTORS[trainer.settings.dtype] * own + _LEAST_APART
            text += f" (HuggingFace {own:.1e}, limit {limit:.1e})"
        else:
            limit = trainer.limits["gradients"]
            text += f", limit {limit:.0e}, estimated"
        findings.append(trainer.make_finding("gradients", f"{kind} against HuggingFace", apart[worst] <= limit, text))
        if trainer.model.experts:
            findings.append(_check_routed(trainer, kind))
    return findings


def _check_routed(trainer: CheckedTrainer, kind: str) -> Finding:
    """Check that each token chose experts once in the last backward pass, and no padding and no dummy did: no logprob
    shows it, and metrics and biases count the choices."""
    counts = trainer.call_ranks("count_routed", kind, trainer.case.batch)
    tokens = counts[0][0]
    wrong = [count for _, layers in counts for count in layers if count != tokens]
    text = f"{(wrong or [tokens])[0]} tokens chose experts, expected {tokens}"
    return trainer.make_finding("gradients", f"{kind}, tokens routed", not wrong, text)


def _cut_names(trainer: CheckedTrainer, reference: Reference) -> Iterator[list[str]]:
    """Cut the names of gradients that are compared into parts of about ``_GRADIENTS_AT_ONCE`` elements."""
    names, size = [], 0
    for name, want in reference.gradients.items():
        if not trainer.settings.lora.rank and trainer.settings.freezes(trainer.model.find_part(name)):
            continue
        if names and size + want.numel() > _GRADIENTS_AT_ONCE:
            yield names
            names, size = [], 0
        names.append(name)
        size += want.numel()
    if names:
        yield names


TRAINER_CHECKS = {
    "attention": check_attention,
    "tokens": check_tokens,
    "images": check_images,
    "layouts": check_layouts,
    "gradients": check_gradients,
}
"""Name -> ``check(trainer)``, ordered so that a failure explains later ones."""
