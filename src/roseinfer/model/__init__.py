"""The model: turns batches of token rows into sampled tokens, in torch."""
