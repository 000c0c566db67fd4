"""vLLM as a sampler that computes with the trainer's own weights."""
