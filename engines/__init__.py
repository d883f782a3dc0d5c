"""The batch, the training engine, the rollout engine, and the weight sync between them. Never imports ray."""
