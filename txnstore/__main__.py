"""The command line as `python -m txnstore`, where the environment's scripts are not on the path."""

from __future__ import annotations

from txnstore.cli import main

if __name__ == "__main__":
    main()
