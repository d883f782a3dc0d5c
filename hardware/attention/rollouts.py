"""The capability table of rollouts: the parts of a rule that each attention backend of vLLM computes.

A rollout that misreads a rule samples from another model, mostly without an error. Settings are checked against this
table before anything starts. docs/masks.md describes the table for users.
"""

from collections.abc import Iterable

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
        "state": Cell(False, "nobody read its kernels of gated delta nets", "rollouts on another platform"),
    },
}
"""Backend -> part of a rule -> its cell. A backend is vLLM's on one kind of machine, with this project's settings."""

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
