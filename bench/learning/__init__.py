"""Check that settings and recipes learn."""
