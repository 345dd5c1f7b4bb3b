"""Process and interpreter: clocks, garbage collection, niceness, memory, child processes, file watching."""
