"""The `roseinfer` command and what it prints; the health check of the image."""
