"""Images: the places of their tokens, their patches, and their split over ranks."""
