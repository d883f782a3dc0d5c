"""Tools that plays call, each call in a process of its own."""
