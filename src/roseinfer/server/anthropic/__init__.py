"""Serves Anthropic's Messages API: a translator onto what all generation APIs share in `server/api/`."""
