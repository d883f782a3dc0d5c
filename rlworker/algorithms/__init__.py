"""What is learned: advantages and losses, as functions of a batch."""
