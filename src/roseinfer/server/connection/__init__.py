"""What guards a socket: deadlines, caps, TLS, keys, and the budget for bodies."""
