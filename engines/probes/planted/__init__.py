"""Faults that are planted into the code of production, by the part of it that they change."""
