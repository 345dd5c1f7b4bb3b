"""The operations port: probes, metrics, profiles and `/debug`."""
