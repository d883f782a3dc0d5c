"""Help on the command line: settings by section, and options by the names that other libraries have."""

from rlworker.config.help.other_names import refuse_other_names
from rlworker.config.help.sections import show_help

__all__ = ["refuse_other_names", "show_help"]
