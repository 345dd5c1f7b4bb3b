"""Writes the dashboards, rules and autoscaling queries into the repository, or compares them with it.

`python tools/generate_dashboards.py` writes dashboards, rules and the demand query into dashboards/ and, where the
chart is, into its files/; with `--check` it writes nothing and names the stale ones.
"""

import sys

from monitoring.outputs import ROOT, files


def main() -> int:
    stale = []
    for path, text in files().items():
        full = ROOT / path
        if not full.exists() or full.read_text() != text:
            stale.append(str(path))
            if "--check" not in sys.argv[1:]:
                full.parent.mkdir(parents=True, exist_ok=True)
                full.write_text(text)
                print(f"wrote {path}")
    if stale and "--check" in sys.argv[1:]:
        print(f"stale: {', '.join(stale)}; run `make dashboards`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
