"""How reward functions are called, and what they may return."""
