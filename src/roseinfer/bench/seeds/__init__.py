"""`roseinfer bench streaming` and `bench scheduler`: load on an `LLM` in this process, with the flags of the seeds."""
