"""Folders to begin with: a recipe, ten rows and a reward that run as they are."""
