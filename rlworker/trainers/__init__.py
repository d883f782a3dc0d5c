"""The loop: a step of RL or of supervised training, and the code that both share."""
