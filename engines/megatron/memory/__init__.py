"""Planned memory of a rank, computed from the settings and the shape of the model alone."""
