"""Tokens become logprobs and gradients here: the batch, the engines and the data between them. Never imports ray."""
