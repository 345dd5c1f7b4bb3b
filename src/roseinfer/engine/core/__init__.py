"""The engine of an afternoon: schedules, launches and commits steps over paged KV blocks."""
