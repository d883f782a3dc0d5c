"""Planned memory: what a rank holds, from the settings and the shape of the model alone."""
