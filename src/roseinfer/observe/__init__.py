"""Facts: turns records and timelines into metrics, causes of gaps, recordings, traces and logs."""
