"""Turns and tools: what answers a completion, and how the next prompt is made of it."""
