"""Toys that a tiny model learns on a laptop's CPU."""
