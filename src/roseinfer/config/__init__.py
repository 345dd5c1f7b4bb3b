"""The configuration: options, and the sources that set them."""
