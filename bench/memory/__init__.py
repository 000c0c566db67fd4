"""How many bytes a training step takes, feature by feature."""
