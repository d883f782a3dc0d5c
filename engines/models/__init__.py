"""Models as HuggingFace saves them: shape, names of weights, files."""
