"""Environments of the recipes that play, and players to compare a policy with."""
