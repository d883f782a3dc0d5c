"""Ray: the processes of a run, in groups, and the failures among them."""
