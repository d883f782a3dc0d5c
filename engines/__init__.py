"""How tokens become logprobs and gradients: the batch, the engines and what passes between them. Never imports ray."""
