"""Tokenizing: text to token ids, sampled ids to text, and the files that tokenizers are read from."""
