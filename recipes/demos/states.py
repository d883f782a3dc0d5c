"""A model with states learns the demo's addition: a gated delta net in one layer, gated attention in the other.

A tiny Qwen3.5 is made and warmed up as in recipes.demos.cpu. States and convolutions begin anew with each sequence of a
pack, in the trainer and in vLLM (docs/masks.md, "States are masks too").
"""

from dataclasses import replace

from recipes.common.addition import make_state_model
from recipes.common.toys import run_toy
from recipes.demos import cpu as demo_cpu

STATE_ADDITION = replace(demo_cpu.ADDITION, make_model=make_state_model)
DEFAULT = replace(demo_cpu.DEFAULT, run_dir="runs/demo_states")

if __name__ == "__main__":
    run_toy(DEFAULT, __doc__, STATE_ADDITION)
