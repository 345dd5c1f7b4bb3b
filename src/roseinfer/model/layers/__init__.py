"""The layers of a model: linears in every precision, norms, rotations, activations."""
