"""The things that a run writes: its folder, its log, its report."""
