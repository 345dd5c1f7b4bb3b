"""Runs the server of a replica: `python -m roseinfer.ray.child CONFIG`, the whole configuration as JSON."""

import os
import sys

import msgspec

from roseinfer import serving
from roseinfer.config.api_keys import KEYS_VARIABLE
from roseinfer.config.options import Config
from roseinfer.errors import RoseinferError
from roseinfer.runtime.child_process import die_with_parent


def main() -> int:
    """Serve until SIGTERM, or until the replica has gone, however it went."""
    die_with_parent()
    try:
        return serving.serve(msgspec.json.decode(sys.argv[1], type=Config), os.environ.get(KEYS_VARIABLE, ""))
    except RoseinferError as error:
        sys.exit(f"roseinfer: {error}")


if __name__ == "__main__":
    raise SystemExit(main())
