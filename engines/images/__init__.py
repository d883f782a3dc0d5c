"""Images: where their tokens are, their patches, and who sees them."""
