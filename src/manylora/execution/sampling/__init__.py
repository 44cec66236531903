"""From logits to tokens: grammar masks, filters and counter-based draws."""
