"""Bytes: planned, measured, and what is done when they run out."""
