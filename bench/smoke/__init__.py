"""Run a few steps of the trainer in every variant that a card has."""
