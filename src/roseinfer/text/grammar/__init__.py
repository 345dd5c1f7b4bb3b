"""Grammars into the tokens that may come next. Knows no HTTP, no model and no scheduler."""
