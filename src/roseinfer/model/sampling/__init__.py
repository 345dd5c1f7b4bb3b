"""From logits to tokens: penalties, masks, temperature, top-k, top-p, min-p, and log-probabilities."""
