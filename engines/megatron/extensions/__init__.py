"""Extensions of a training engine: what experts, adapters and images add to it."""
