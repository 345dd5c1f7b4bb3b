"""Attention over the paged KV cache: one file a backend, and the registry that chooses one."""
