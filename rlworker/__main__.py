"""The ``rlworker`` command, as ``python -m rlworker``."""

from rlworker.cli import main

if __name__ == "__main__":
    main()
