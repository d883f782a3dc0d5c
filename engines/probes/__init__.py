"""Probes: checks ask these of an engine, and must find the faults that are planted here."""
