"""A step is made of these: prompts and answers, the batch, and the rank that computes each part of it."""
