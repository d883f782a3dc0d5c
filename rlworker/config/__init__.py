"""The settings of a run, and their checks before it starts."""
