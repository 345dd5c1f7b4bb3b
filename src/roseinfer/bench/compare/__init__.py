"""`roseinfer bench compare`: two sides measured in turn, into effects with intervals and a verdict."""
