"""Memory of a rank: planned from the settings and the shape of the model alone, and offloaded to the host."""
