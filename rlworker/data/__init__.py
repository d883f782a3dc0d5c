"""Rows to learn from: where they are, what they hold, their images."""
