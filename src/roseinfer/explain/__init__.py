"""What a person asks of a server's facts: why the gaps between tokens are as they are, and what is going on now."""
