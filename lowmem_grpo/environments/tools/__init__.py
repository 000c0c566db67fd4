"""Functions that a policy may call."""
