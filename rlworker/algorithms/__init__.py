"""Advantages and losses of a policy, as plain functions of a batch."""
