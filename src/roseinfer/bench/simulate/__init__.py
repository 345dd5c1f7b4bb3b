"""`roseinfer bench simulate` and `replay`: the real scheduler on a virtual clock."""
