"""OpenTelemetry spans and NVTX ranges, made from the same facts as the metrics."""
