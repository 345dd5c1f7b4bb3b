"""Load over HTTP: plans of requests, the client that sends and stamps them, and its reports."""
