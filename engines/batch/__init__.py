"""What a step is made of: prompts and answers, the batch, and who computes which part of it."""
