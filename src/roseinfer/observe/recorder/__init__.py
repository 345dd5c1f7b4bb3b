"""The recording of the last minutes: its file format, captures, the timeline and its page."""
