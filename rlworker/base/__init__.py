"""The ground floor: errors for the user, lines on the terminal, digests of files, findings of checks."""
