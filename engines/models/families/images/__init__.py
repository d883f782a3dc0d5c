"""Families of language models with a vision tower."""
