"""Model families: one file for each architecture, and the registry that finds it by what config.json names."""
