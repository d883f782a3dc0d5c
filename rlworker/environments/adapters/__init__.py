"""Adapters that make environments, or tools of environments, of what other packages define."""
