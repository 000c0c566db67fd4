"""What a run will take before it starts: settings with which it fits a card, and the seconds of its steps."""
