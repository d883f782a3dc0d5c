"""Planned memory of a rank, from the settings and the shape of the model alone."""
