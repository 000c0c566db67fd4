"""Seconds: what a step should take on a card, planned from its data sheet."""
