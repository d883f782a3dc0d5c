"""Families of language models with mixtures of experts."""
