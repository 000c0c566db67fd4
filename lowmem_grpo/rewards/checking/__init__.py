"""`rewards.check`: tries reward functions before a run."""
