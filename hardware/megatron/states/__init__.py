"""Layers that carry a state from token to token: their description, and their module."""
