"""Writes the documents, and other files, that are generated from the source.

`python tools/generate_docs.py` writes them; with `--check` it writes nothing and names the stale ones.
"""

import sys

import causes_docs
import chart_docs
import http_api_docs
import metrics_docs
import models_docs
import performance_docs
import source_map
from generated_files import write_or_check
from roseinfer.config import docs as config_docs

PAGES = {
    "docs/architecture.md": source_map.architecture,
    "docs/causes.md": causes_docs.page,
    f"{causes_docs.PAGE}/causes.css": causes_docs.style,
    f"{causes_docs.PAGE}/causes.js": causes_docs.script,
    "docs/configuration.md": config_docs.markdown,
    "docs/http-api.md": http_api_docs.page,
    "docs/metrics.md": metrics_docs.page,
    "docs/models.md": models_docs.page,
    "docs/performance.md": performance_docs.page,
    "docs/source.md": source_map.page,
    "deploy/helm/roseinfer/values.schema.json": chart_docs.schema,
    "deploy/helm/roseinfer/README.md": chart_docs.page,
}

if __name__ == "__main__":
    sys.exit(write_or_check({name: render() for name, render in PAGES.items()}, "make docs"))
