"""Folders of models: found, read, checked and written."""
