"""Probes of an engine for checks, and planted faults that the checks must find."""
