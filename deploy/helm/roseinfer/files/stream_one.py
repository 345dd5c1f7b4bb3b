"""Streams one short completion from URL and fails unless it ends well. Needs Python alone; knows no cluster.

`python stream_one.py URL [KEY_FILE]`: the key is the last word of the file's first line that has one.
"""

import json
import ssl
import sys
import urllib.request


def main(url: str, key_file: str | None = None) -> int:
    headers = {"Content-Type": "application/json"}
    if key_file:
        with open(key_file) as lines:
            key = next(line.split()[-1] for line in lines if line.strip() and not line.startswith("#"))
        headers["Authorization"] = f"Bearer {key}"
    body = json.dumps({"prompt": "The scheduler", "max_tokens": 8, "stream": True}).encode()
    # The certificate is for the name that clients use, and this is the Service's; who it is was never in question.
    context = ssl._create_unverified_context() if url.startswith("https:") else None  # noqa: S323, SLF001
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=120, context=context) as answer:
        events = [line[6:].strip().decode() for line in answer if line.startswith(b"data: ")]
    if not events or events[-1] != "[DONE]":
        print(f"the stream did not end with [DONE]: {events[-1:]}", file=sys.stderr)
        return 1
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    text = "".join(choice["text"] for choice in choices)
    reason = choices[-1]["finish_reason"] if choices else None
    print(f"{text!r} in {len(events) - 1} events, finish reason {reason}")
    return 0 if reason in {"stop", "length"} else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
