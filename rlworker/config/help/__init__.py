"""Help on the command line: settings by section, and options by the names that other libraries have."""
