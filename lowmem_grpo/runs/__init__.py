"""A run's state and its files on disk: records, checkpoints, adapters, alarms."""
