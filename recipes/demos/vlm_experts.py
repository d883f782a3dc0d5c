"""A Qwen3.5 with experts and states learns the squares of recipes.demos.vlm, its experts shared out over two ranks.

The model is made and warmed up as there. Its folder has the experts of a layer fused, as released ones do, and weights
go to vLLM in that form. Experts of each token are those that vLLM chose (router replay, arXiv:2510.11370), where the
platform records them.
"""

from dataclasses import replace

from recipes.common import squares
from recipes.common.toys import run_toy
from recipes.demos import vlm

EXPERT_SQUARES = replace(vlm.SQUARES, make_model=squares.make_expert_model)
DEFAULT = replace(
    vlm.DEFAULT,
    run_dir="runs/demo_vlm_experts",
    actor=replace(vlm.DEFAULT.actor, ep=2),
    rollout=replace(vlm.DEFAULT.rollout, replay_routes=True),
)

if __name__ == "__main__":
    run_toy(DEFAULT, __doc__, EXPERT_SQUARES)
