"""Vision towers of models: their description, read from a config."""
