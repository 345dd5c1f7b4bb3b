"""Writes the dashboards, rules and autoscaling queries into dashboards/ and into the chart's files/.

With `--check` it writes nothing and names the stale ones.
"""

import sys

from generated_files import write_or_check
from monitoring.outputs import files

if __name__ == "__main__":
    sys.exit(write_or_check({str(path): text for path, text in files().items()}, "make dashboards"))
