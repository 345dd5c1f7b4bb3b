"""The engine of an afternoon: schedule, launch, commit, over paged KV blocks."""
