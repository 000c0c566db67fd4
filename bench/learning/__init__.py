"""Whether settings and recipes learn."""
