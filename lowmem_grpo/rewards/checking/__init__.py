"""`rewards.check`, which tries reward functions before a run."""
