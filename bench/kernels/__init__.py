"""Measure how fast and how exact each kernel is, and compile it for every chip."""
