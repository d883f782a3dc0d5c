"""Who may see whom, and which of it each attention kernel honours."""
