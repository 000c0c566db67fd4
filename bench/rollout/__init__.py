"""Measure how fast engines sample, and how well they agree with the trainer."""
