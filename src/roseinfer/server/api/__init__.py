"""What the generation APIs share: reading a body, running it, and writing the answer, whole or as a stream."""
