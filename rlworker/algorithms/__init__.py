"""Advantages and losses: plain functions of a batch."""
