"""Writes the table of predicted steps into docs/performance.md."""

import sys

from generated_files import ROOT, filled

sys.path.append(str(ROOT))  # a script in tools/ has its own folder there, and not the repository's

from benchmarks.gpu.performance_model import markdown


def page() -> str:
    return filled("docs/performance.md", {"table of predicted steps": markdown()})
