"""`LLM`: the engine as a Python object, without HTTP."""
