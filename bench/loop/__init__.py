"""How long a step of the whole loop takes, beside other trainers."""
