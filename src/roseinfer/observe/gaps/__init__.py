"""Gaps between tokens: their intervals, their causes, and each request's ledger of time."""
