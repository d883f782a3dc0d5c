"""The loop: a step of RL or of supervised training, and what both share."""
