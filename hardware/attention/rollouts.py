"""The capability table of rollouts: the parts of a rule that each attention backend of vLLM computes.

A rollout that misreads a rule samples from another model, mostly without an error. Settings are checked against this
table before anything starts. docs/masks.md describes the table for users.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hardware.attention.cell import Cell
from hardware.attention.rules import RULES, Rule

_NO_FULL = Cell(False, "tokens are sampled one after another, so that none sees the future", "a causal rule")
_NO_CHUNK = Cell(False, "vLLM cuts sequences at chunks by a backend that nobody compared here", "a window")
_NO_PREFIX = Cell(False, "vLLM lets the tokens of images see ahead, and never the text of a prompt", "the image rule")
_NO_STATE = Cell(
    False,
    "its kernel of gated delta nets takes bfloat16 and key heads of 128 alone",
    "vllm_cpu_states, which is taken by itself",
    has_stand_in=False,
)
_REFUSED = {"full": _NO_FULL, "chunk": _NO_CHUNK, "prefix": _NO_PREFIX}


def _honour(evidence, window: str) -> dict[str, Cell]:
    return {
        "causal": Cell(True, "its own", evidence=evidence),
        "window": Cell(True, window, composes=True, evidence=evidence),
    }


_CPU = _REFUSED | _honour("executed", "a window of the kernel on every layer or, where the family is read so, on some")
_CPU |= {"state": _NO_STATE}
_UNTRIED = _REFUSED | _honour("untested", "a window of the kernel")

ROLLOUTS: dict[str, dict[str, Cell]] = {
    "vllm_cpu": _CPU
    | {
        "images": Cell(
            False,
            "it never reads where images lie and computes them causally, without a word",
            "vllm_cpu_images, which is taken by itself",
        )
    },
    "vllm_cpu_images": _CPU
    | {
        "images": Cell(True, "an image is a sequence of its own that is not causal", composes=True, evidence="executed")
    },
    "vllm_cpu_states": _CPU
    | {
        "images": Cell(False, "no model has images both ways and states, and nobody compared them", "vllm_cpu_images"),
        "state": Cell(
            True,
            "the trainer's own arithmetic over vLLM's cache of states, which begin anew with each request",
            composes=True,
            evidence="executed",
        ),
    },
    "vllm_cuda": _UNTRIED
    | {
        "images": Cell(
            True,
            "FlashAttention 4, Triton or FlexAttention; without chunks of a prompt, which cut images",
            composes=True,
        ),
        "state": Cell(True, "FLA's kernels begin a state and a convolution anew with each request"),
    },
    "vllm_ascend": _UNTRIED
    | {
        "images": Cell(
            False,
            "it has no rule for images and computes them causally, without a word",
            "a model of causal images, such as Qwen's, or rollouts on another platform",
        ),
        "state": Cell(
            True, "recurrent and chunk kernels of vllm-ascend 0.23: a state and a convolution begin at zero anew"
        ),
    },
}
"""Backend -> part of a rule -> its cell. A backend is vLLM's on one kind of machine, with this project's settings."""


@dataclass(frozen=True)
class Needs:
    """A backend computes a part of a rule under these settings of an engine alone.

    Attributes:
        dtypes: types of weights that its kernels take, the first is the nearest to any other.
        arguments: arguments of vLLM's LLM that the engine sets, and that the settings may not change.
        reason: why, for the message of a refusal. warning: what a run says at its start.
    """

    dtypes: tuple[str, ...]
    arguments: Mapping[str, bool]
    reason: str
    warning: str


NEEDS = {
    "vllm_ascend/state": Needs(
        ("bfloat16",),
        {"enforce_eager": True, "enable_prefix_caching": False},
        "kernels of gated delta nets take bfloat16 alone, and were read without graphs and without cached prefixes",
        "kernels of gated delta nets were read in vllm-ascend 0.23.0 and ran nowhere here; the limits on the "
        "difference of logprobs watch them from the first step on",
    )
}
"""Cell by its name in ``PLACES`` -> what it needs. All of these cells are untested."""

ROUTE_ARGUMENTS = {"enable_return_routed_experts": True, "enable_prefix_caching": True}
"""Arguments of vLLM's LLM under which it returns the experts of every token; it keeps those of cached tokens beside
their blocks."""

PLACES = {f"{backend}/{part}": cell for backend, cells in ROLLOUTS.items() for part, cell in cells.items()}
"""Name of a cell in ``attention_override`` -> cell."""


def list_parts(rules: Iterable[Rule]) -> list[str]:
    """Return the parts of the rules of a model's layers, in the order of ``RULES``."""
    asked = {part for rule in rules for part in rule.parts}
    return [part for part in RULES if part in asked]


def find_rollout_backend(backends: Iterable[str], rules: Iterable[Rule], override: Iterable[str] = ()) -> str:
    """Return the first of ``backends`` that computes every part of a model's rules.

    Args:
        override: names of refused cells that are used nevertheless.

    Raises:
        ValueError: no backend computes all rules; the message has the reason for each backend and an alternative.
    """
    parts, refusals = list_parts(rules), []
    for backend in backends:
        refused = [p for p in parts if not ROLLOUTS[backend][p].honoured and f"{backend}/{p}" not in override]
        if not refused:
            return backend
        refusals += [
            f"{backend}/{part} is refused: {ROLLOUTS[backend][part].text}; nearest: {ROLLOUTS[backend][part].nearest}"
            for part in refused
        ]
    raise ValueError(
        f"rollout: no backend honours a model with the rules {', '.join(parts)}: {'. '.join(refusals)}. Or name the "
        "cell in --rollout.attention-override, and the run is approximate"
    )


def find_needed_arguments(backend: str, rules: Iterable[Rule]) -> dict[str, bool]:
    """Return the arguments of vLLM's LLM that a backend needs to compute all rules of a model."""
    arguments: dict[str, bool] = {}
    for _, needs in _find_needs(backend, rules):
        arguments |= needs.arguments
    return arguments


def check_needs(backend: str, rules: Iterable[Rule], dtype: str, arguments: Mapping[str, object]) -> None:
    """Raise ValueError if an engine's settings are none by which a backend computes all rules of a model.

    Args:
        dtype: type of the weights. arguments: arguments of vLLM's LLM that the settings give.
    """
    for place, needs in _find_needs(backend, rules):
        if dtype not in needs.dtypes:
            raise ValueError(
                f"rollout: {place}: {needs.reason}, and --rollout.dtype is {dtype}, expected {needs.dtypes[0]}; set it"
            )
        for name, needed in needs.arguments.items():
            if bool(arguments.get(name, needed)) != needed:
                raise ValueError(
                    f"rollout: {place}: {needs.reason}, and --rollout.vllm sets {name} {arguments[name]}, expected "
                    f"{needed}; leave it out"
                )


def list_needs_warnings(backend: str, rules: Iterable[Rule]) -> list[str]:
    """Return a warning for each cell of a backend that a model uses and that has needs."""
    return [f"rollout: {place} is untested: {needs.warning}" for place, needs in _find_needs(backend, rules)]


def _find_needs(backend: str, rules: Iterable[Rule]) -> list[tuple[str, Needs]]:
    places = [f"{backend}/{part}" for part in list_parts(rules)]
    return [(place, NEEDS[place]) for place in places if place in NEEDS]


def check_rollout_override(override: Iterable[str]) -> None:
    """Raise ValueError if an override names no cell, or a cell that needs no override or that none helps."""
    useful = [place for place, cell in PLACES.items() if not cell.honoured and cell.has_stand_in]
    for name in override:
        if name not in PLACES:
            raise ValueError(
                f"rollout: attention_override {name!r} names no cell of the capability table of rollouts; expected one "
                f"of {useful}"
            )
        cell = PLACES[name]
        if cell.honoured:
            raise ValueError(f"rollout: attention_override {name!r} works without an override; leave it out")
        if not cell.has_stand_in:
            raise ValueError(
                f"rollout: attention_override {name!r} does nothing: {cell.text}; leave it out, nearest: {cell.nearest}"
            )


def list_rollout_warnings(override: Iterable[str]) -> list[str]:
    """Return the warnings of a run, one for each cell in ``override``, which makes its rollouts approximate."""
    return [
        f"rollout: {name} is refused by the capability table ({PLACES[name].text}; nearest: {PLACES[name].nearest}) "
        "and used all the same, as --rollout.attention-override asks: samples are those of an approximate model"
        for name in override
    ]
