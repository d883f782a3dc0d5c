"""Episodes: what a model and its environment write in turns."""
