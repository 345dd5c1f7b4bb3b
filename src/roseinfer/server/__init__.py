"""HTTP: turns requests into generations, and their text into answers and streams."""
