"""Tokens: decides which sequences advance, and keeps their blocks."""
