"""Sampling: the completions of a step, and the batch that is made of them."""
