"""Generates dashboards, rules and the autoscaling queries from the catalogue of metrics, and previews them."""
