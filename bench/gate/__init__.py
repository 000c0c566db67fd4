"""Everything that needs a card, as one command."""
