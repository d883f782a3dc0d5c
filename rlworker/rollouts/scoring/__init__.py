"""Questions of environments to served models: judges and classifiers."""
