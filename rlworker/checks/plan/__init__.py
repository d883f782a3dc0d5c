"""Plans of a run: its memory on a machine, and the seconds of a step there."""
