"""Recipes whose episodes are played by agents that know nothing of training."""
