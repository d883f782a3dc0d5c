"""A step is made of these: prompts and answers, the batch, and who computes which part of it."""
