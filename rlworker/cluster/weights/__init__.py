"""Weights on their way from training ranks to rollout workers."""
