"""TEXT. Turns prompts into token ids and sampled tokens into text: tokenizer, templates, stops, tools, grammar."""
