"""What checks ask of an engine, and the faults that they must find."""
