"""Tools that environments call, each call in a process of its own."""
