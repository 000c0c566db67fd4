"""Whether a larger tiny model learns with the full stack on a card."""
