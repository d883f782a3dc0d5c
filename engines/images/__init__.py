"""Images: where their tokens are, their patches, and the ranks that see them."""
