"""What a run is and leaves on disk: state, records, checkpoints, alarms."""
