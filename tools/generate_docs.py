"""Turns the source into the pages of docs/ that are generated. Knows which function writes which page.

`python tools/generate_docs.py` writes them; with `--check` it writes nothing and names the stale ones.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import http_api_docs
import metrics_docs
from roseinfer import config_docs

DOCS = Path(__file__).resolve().parents[1] / "docs"

PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": config_docs.markdown,
    "http-api.md": http_api_docs.page,
    "metrics.md": metrics_docs.page,
}


def main() -> int:
    stale = []
    for name, render in PAGES.items():
        path, text = DOCS / name, render()
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if "--check" not in sys.argv[1:]:
                path.write_text(text)
                print(f"wrote docs/{name}")
    if stale and "--check" in sys.argv[1:]:
        print(f"stale: {', '.join(stale)}; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
