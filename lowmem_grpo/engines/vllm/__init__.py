"""vLLM as a sampling engine that computes with the trainer's own weights."""
