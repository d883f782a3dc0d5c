"""The data of a step: prompts and completions, the batch, and its schedule over replicas."""
