"""Advantages and losses: what a policy learns from, as plain functions of a batch."""
