"""Time a step of the whole loop, beside other trainers."""
