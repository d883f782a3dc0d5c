"""A device that is not there: its tensors have shapes, types and places, and no numbers."""
