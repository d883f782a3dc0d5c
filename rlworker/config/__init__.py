"""The settings of a run, and what is checked of them before it starts."""
