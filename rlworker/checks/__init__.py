"""``rlworker check`` and ``rlworker plan``: proofs and plans before a run."""
