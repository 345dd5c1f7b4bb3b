"""Gives a request the id of its trace when it arrives, so that logs of every process can name it.

The header is that of W3C Trace Context, https://www.w3.org/TR/trace-context/. Whether the trace is kept is decided
elsewhere.
"""

import os
import re

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def trace_id_of(traceparent: str) -> str:
    """Returns the caller's trace id, or a new one where the header is empty or not in the form of the standard."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is not None and not (traceparent.startswith("00") and found[2]):
        return found[1]
    return os.urandom(16).hex()
