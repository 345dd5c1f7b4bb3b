"""Checks the grammars of requests, and compiles them into masks of the tokens that may come next."""
