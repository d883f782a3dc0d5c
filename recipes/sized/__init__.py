"""Recipes of text models by name, with the sizes of a machine for them."""
