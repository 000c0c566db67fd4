"""Tools: functions that a policy may call."""
