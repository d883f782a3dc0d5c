"""Rows to learn from: their files, their fields, their images."""
