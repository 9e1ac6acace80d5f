"""Sample tokens from logits: penalties, masks, filters, noise and log probabilities."""
