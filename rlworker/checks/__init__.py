"""``rlworker check`` and ``rlworker plan``: proof of a model's numbers, and an estimate of a run's memory."""
