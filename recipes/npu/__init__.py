"""Recipes at the sizes of a node of sixteen Ascend cards."""
