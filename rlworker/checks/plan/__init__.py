"""What a run needs of a machine, and how long a step takes there."""
