"""TENSORS. Turns a batch of token rows into sampled tokens; the only importer of torch. Never sees text or HTTP."""
