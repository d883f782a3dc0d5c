"""An OpenAI-compatible endpoint: an agent that knows nothing of training plays an episode by its calls."""
