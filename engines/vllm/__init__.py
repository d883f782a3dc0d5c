"""The rollout engine on vLLM."""
