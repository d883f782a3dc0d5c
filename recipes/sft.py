"""Supervised training on your own model and your own rows.

    python -m recipes.sft --model FOLDER --run-dir runs/mine --data.train train.jsonl --data.heldout heldout.jsonl
    python -m recipes.sft --smoke                      the same recipe, tiny, on a CPU

A row has a prompt and its answer, {"prompt": "3 + 4?", "answer": "7"}, or a whole conversation, {"messages": [{"role":
"user", "content": "3 + 4?"}, ...]}, with the JSON schemas of its "tools" where it has any. Of a conversation every
message of the assistant is learned. The checkpoint's ``hf`` is a HuggingFace folder from which every RL recipe can
start.

On the worked solutions of GSM8K, for instance:

    python -m recipes.sft --model FOLDER --run-dir runs/gsm8k --data.train hf:openai/gsm8k/main:train
        --data.heldout hf:openai/gsm8k/main:test --data.prompt-field question
        --data.instruction "Reason step by step, and end with #### and the final answer."
"""

from recipes.common.smoke import SftRecipeConfig, parse_recipe_config
from rlworker import MegatronConfig, OptimizerConfig, launch_supervised

OPTIMIZER = OptimizerConfig(lr=1e-5, lr_scheduler="cosine", lr_warmup_steps=10, weight_decay=0.01)
DEFAULT = SftRecipeConfig(run_dir="runs/sft", actor=MegatronConfig(optimizer=OPTIMIZER))

if __name__ == "__main__":
    launch_supervised(parse_recipe_config(DEFAULT, __doc__))
