"""Measure the bytes that a training step takes, feature by feature."""
