"""TEXT. Turns HTTP requests into token requests and sampled tokens into streamed text. Never sees torch or a block."""
