"""Rows to learn from: their sources, their fields, their images."""
