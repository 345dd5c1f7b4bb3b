"""Model families: one file for each architecture, and the registry that finds it by `model_type`."""
