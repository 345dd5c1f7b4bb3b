"""Writes the documents, and other files, that are generated from the source.

`python tools/generate_docs.py` writes them; with `--check` it writes nothing and names the stale ones.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import causes_docs
import chart_docs
import http_api_docs
import metrics_docs
from roseinfer.config import docs as config_docs

ROOT = Path(__file__).resolve().parents[1]

PAGES: dict[str, Callable[[], str]] = {
    "docs/causes.md": causes_docs.page,
    f"{causes_docs.PAGE}/causes.css": causes_docs.style,
    f"{causes_docs.PAGE}/causes.js": causes_docs.script,
    "docs/configuration.md": config_docs.markdown,
    "docs/http-api.md": http_api_docs.page,
    "docs/metrics.md": metrics_docs.page,
    "deploy/helm/roseinfer/values.schema.json": chart_docs.schema,
    "deploy/helm/roseinfer/README.md": chart_docs.page,
}


def main() -> int:
    stale = []
    for name, render in PAGES.items():
        path, text = ROOT / name, render()
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if "--check" not in sys.argv[1:]:
                path.write_text(text)
                print(f"wrote {name}")
    if stale and "--check" in sys.argv[1:]:
        print(f"stale: {', '.join(stale)}; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
