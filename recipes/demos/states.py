"""A model with states learns the demo's addition: a gated delta net in one layer, gated attention in the other.

A tiny Qwen3.5 is made and warmed up as in recipes.demos.cpu. States and convolutions begin anew with each sequence of a
pack, in the trainer and in vLLM (docs/masks.md, "States are masks too").

With ``--leak`` the trainer's states and convolutions run on from one sequence of a pack to the next. The comparison of
logprobs ends that run in its first step; with ``--limits.ignore-logprob-diff`` it goes on and shows what a leak costs.
"""

from dataclasses import dataclass, replace
from typing import Any

from recipes.common.addition import make_state_model
from recipes.common.toys import run_toy
from recipes.demos import cpu as demo_cpu
from rlworker import Trainer


@dataclass(frozen=True)
class StateConfig(demo_cpu.DemoConfig):
    """Settings of the demo: those of demos.cpu, and a second control."""

    leak: bool = False
    """Control: states and convolutions of the trainer run on from one sequence of a pack to the next."""


class LeakingTrainer(Trainer):
    """A trainer whose actor leaks by states and convolutions."""

    def begin(self) -> None:
        super().begin()
        self.actor.run("engines.probes.faults:plant", "convolutions and states run on")


def make_trainer(config: StateConfig, *arguments: Any, **parts: Any) -> Trainer:
    return (LeakingTrainer if config.leak else Trainer)(config, *arguments, **parts)


STATE_ADDITION = replace(demo_cpu.ADDITION, make_model=make_state_model, make_trainer=make_trainer)
DEFAULT = replace(StateConfig(**vars(demo_cpu.DEFAULT)), run_dir="runs/demo_states")

if __name__ == "__main__":
    run_toy(DEFAULT, __doc__, STATE_ADDITION)
