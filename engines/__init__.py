"""Tokens become logprobs and gradients here: the batch, the engines and what passes between them. Never imports ray."""
