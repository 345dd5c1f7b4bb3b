"""`python -m roseinfer`: the same as the `roseinfer` command."""

import sys

from roseinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
