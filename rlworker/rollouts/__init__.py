"""What a step samples, and the batch that is made of it."""
