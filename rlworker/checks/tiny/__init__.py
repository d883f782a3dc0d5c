"""Tiny models of every family, made on the spot."""
