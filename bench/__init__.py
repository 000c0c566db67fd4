"""Measurements, a folder for each question; run from the repository's root, as in `python -m bench.loop.bench`."""
