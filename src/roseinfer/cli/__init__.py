"""The `roseinfer` command: its verbs, its terminal, and what it prints."""
