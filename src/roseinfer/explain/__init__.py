"""`roseinfer explain` and `roseinfer top`: why gaps between tokens are as they are, and what a server does now."""
