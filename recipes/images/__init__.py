"""Runs of models that see images or videos: ``python -m recipes.images.NAME --help``."""
