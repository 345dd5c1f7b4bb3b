"""Weights: finds, fetches and reads checkpoints, and keeps what was packed for the next start."""
