"""A mixture of experts learns the demo's addition, its experts shared out over two ranks.

A tiny Qwen3-MoE is made and warmed up as in recipes.demos.cpu. In each layer a router chooses two of eight experts for
a token; each rank holds four of them (expert parallelism), and tokens travel to their experts and back. The trainer
sends each token to the experts that vLLM chose (router replay, arXiv:2510.11370), which a CPU's engine records.
"""

from dataclasses import replace

from recipes.common.addition import make_expert_model
from recipes.common.toys import run_toy
from recipes.demos import cpu as demo_cpu

EXPERT_ADDITION = replace(demo_cpu.ADDITION, make_model=make_expert_model)
_ACTOR = demo_cpu.DEFAULT.actor
DEFAULT = replace(
    demo_cpu.DEFAULT,
    run_dir="runs/demo_experts",
    # At the dense model's rate tokens change experts within a step, and a few ratios are then in the tens.
    actor=replace(_ACTOR, ep=2, optimizer=replace(_ACTOR.optimizer, lr=5e-4)),
    rollout=replace(demo_cpu.DEFAULT.rollout, replay_routes=True),
)

if __name__ == "__main__":
    run_toy(DEFAULT, __doc__, EXPERT_ADDITION)
