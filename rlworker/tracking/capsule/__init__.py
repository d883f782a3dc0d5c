"""Capsules: a step of a run that is kept, to be computed anew elsewhere."""
