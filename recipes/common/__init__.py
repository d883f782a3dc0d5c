"""Recipes share these: toys to learn, a tiny version of large runs, answers that are right as mathematics."""
