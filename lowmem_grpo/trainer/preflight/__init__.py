"""Checks before a run: mistakes that would stop it or make it learn nothing, each with its fix."""
