"""Reward functions, and the processes that call them."""
