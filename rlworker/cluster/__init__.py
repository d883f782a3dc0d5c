"""Ray: the processes of a run, in groups, and who of them failed."""
