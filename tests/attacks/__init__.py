"""Attacks on the package, as data. Each command prints how many succeeded, and fails if any did."""
