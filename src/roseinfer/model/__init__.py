"""TENSORS: turns batches of token rows into sampled tokens. Only this package imports torch."""
