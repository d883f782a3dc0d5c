"""Attention rules: who may see whom, and which rules each attention kernel honours."""
