"""The learner, and one file a trainer."""
