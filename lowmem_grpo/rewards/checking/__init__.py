"""A try of rewards before a run."""
