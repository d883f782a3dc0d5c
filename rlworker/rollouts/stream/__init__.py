"""Rollouts that run ahead of the trainer: groups in the order in which they were drawn, while weights change."""
