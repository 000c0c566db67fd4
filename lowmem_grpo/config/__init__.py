"""Every field of a run, and what is refused."""
