"""Fetches the configured model into Hugging Face's cache, as the server would, and then leaves a mark.

`python prefetch.py CONFIG MARK`. Pods wait for the mark: a directory that is there may be half of one.
"""

import sys
from pathlib import Path

from roseinfer.config.sources import load
from roseinfer.model.checkpoint import resolve_checkpoint


def main(config_file: str, mark: str) -> int:
    model = load(file=Path(config_file)).config.model
    directory = resolve_checkpoint(model.path, model.revision)
    Path(mark).parent.mkdir(parents=True, exist_ok=True)
    Path(mark).write_text(f"{directory}\n")
    print(f"{model.path} is in {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
