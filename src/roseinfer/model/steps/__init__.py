"""Steps: stages their inputs, and repeats steps that were captured or recorded, without the Python between."""
