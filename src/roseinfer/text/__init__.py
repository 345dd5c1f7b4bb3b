"""Text: turns prompts into token ids and sampled tokens into text, for the server, `LLM` and the terminal."""
