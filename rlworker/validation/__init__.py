"""Validation: a model's answers to held-out rows, and the metrics of them."""
