"""Vision towers on the first pipeline stage, and their features in the place of image tokens."""
