"""`roseinfer bench compare`: two sides measured in turn, with a verdict for each metric."""
