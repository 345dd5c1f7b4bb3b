"""Writes the table of causes into docs/causes.md and into the timeline page's script and style."""

import json

from generated_files import filled
from roseinfer.observe.gaps.causes import CAUSES

SOURCE = "src/roseinfer/observe/gaps/causes.py"
PAGE = "src/roseinfer/observe/recorder/page"


def page() -> str:
    """docs/causes.md with its table."""
    rows = [f"| `{cause}` | {cause.row.meaning} | {cause.row.remedy} |\n" for cause in CAUSES]
    table = "".join(["| cause | what the time went to | what changes it |\n|---|---|---|\n", *rows])
    return filled("docs/causes.md", {"table of causes": table})


def script() -> str:
    """The page's words: cause -> title, meaning, advice."""
    words = {
        cause: [row.title or cause.replace("_", " "), row.meaning, row.remedy]
        for cause in CAUSES
        for row in [cause.row]
    }
    lines = [f"  {cause}: {json.dumps([text.replace('`', '') for text in texts])},\n" for cause, texts in words.items()]
    return f"// Generated from {SOURCE} by `make docs`.\nexport const CAUSES = {{\n{''.join(lines)}}};\n"


def style() -> str:
    """The page's colours of causes, the same in its light scheme and in its dark one."""
    colors = "".join(f"  --c-{cause}: {cause.row.color};\n" for cause in CAUSES)
    return f"/* Generated from {SOURCE} by `make docs`. */\n:root {{\n{colors}}}\n"
