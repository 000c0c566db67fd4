"""The ready-made rewards and verifiers."""
