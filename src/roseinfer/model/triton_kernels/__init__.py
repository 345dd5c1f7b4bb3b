"""Tensors on a GPU into tensors, in Triton: paged attention and norms. Knows nothing about models, steps or buckets."""
