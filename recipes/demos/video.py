"""A vision-language model is to learn which way a square moves in a video, on a laptop CPU, with nothing stubbed.

A tiny Qwen3-VL and its videos are made on the spot, warmed up on answers to a loss that leaves about half of them
wrong, then trained by GRPO from the reward alone, vision tower included. Held-out videos are never trained on, and no
single frame tells the answer. docs/evidence.md has what it learned.
"""

from recipes.common import motion
from recipes.common.toys import Toy, run_toy
from recipes.demos import cpu as demo_cpu
from rlworker import AlgorithmConfig, DataConfig, MegatronConfig, OptimizerConfig, VllmConfig

_WARM_UP = dict(lr=1e-3, min_lr=1e-3, lr_warmup_steps=30, lr_scheduler="constant", adam_beta2=0.98, weight_decay=0.01)
MOTION = Toy(motion.make_data, motion.make_model, demo_cpu.warm_up_on_answers(_WARM_UP, rows=128))
DEFAULT = demo_cpu.DemoConfig(
    run_dir="runs/demo_video",
    data=DataConfig(max_prompt_tokens=32),
    actor=MegatronConfig(
        ranks=2,
        optimizer=OptimizerConfig(lr=5e-4, min_lr=5e-5, lr_scheduler="linear", lr_warmup_steps=5, adam_beta2=0.99),
    ),
    rollout=VllmConfig(max_new_tokens=2, max_model_len=48, max_num_seqs=512, kv_cache_mb=256),
    algorithm=AlgorithmConfig(mini_batches=2),
    warm_up_loss=0.5,
    steps=100,
    prompts_per_step=64,
    samples_per_prompt=8,
    eval_every=20,
)

if __name__ == "__main__":
    run_toy(DEFAULT, __doc__, MOTION)
