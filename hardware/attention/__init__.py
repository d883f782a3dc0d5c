"""Attention rules, and the table of rules that each attention kernel honours."""
