"""``rlworker check`` and ``rlworker plan``: what is proved, or worked out, before a run."""
