"""TOKENS. Decides which sequences advance and keeps their blocks. Never sees text, HTTP or torch."""
