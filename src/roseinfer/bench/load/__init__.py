"""Load over HTTP: plans of requests, the client that sends and stamps them, and reports of what it saw."""
