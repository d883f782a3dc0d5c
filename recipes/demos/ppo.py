"""PPO learns the demo's addition: a Megatron critic beside the actor, in the same processes.

A tiny Qwen3 is made and warmed up as in recipes.demos.cpu; then the critic, which starts as a copy of the warm model
with a head of zeros, learns what a half-written answer is worth, and the actor from what each token changed in it.
"""

from dataclasses import replace

from recipes.common.toys import run_toy
from recipes.demos import cpu as demo_cpu
from rlworker import CriticConfig

DEFAULT = replace(
    demo_cpu.DEFAULT,
    run_dir="runs/ppo_addition",
    critic=CriticConfig(train=True, lr=1e-3, lam=1.0, warmup_steps=5),
    steps=200,
)

if __name__ == "__main__":
    run_toy(DEFAULT, __doc__, demo_cpu.ADDITION)
