"""The configuration: options, and the file, environment and flags that set them."""
