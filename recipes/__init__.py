"""Complete runs in Python: ``python -m recipes.NAME --help``."""
