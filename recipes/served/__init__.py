"""Recipes of agents that call the policy over HTTP, and of judges that the run serves beside it."""
