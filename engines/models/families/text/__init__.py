"""Families of language models with an MLP in every layer."""
