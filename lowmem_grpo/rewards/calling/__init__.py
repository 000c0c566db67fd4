"""The calls of reward functions, and the checks of their results."""
