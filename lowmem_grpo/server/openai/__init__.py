"""OpenAI-compatible completions from the trainer's own engine, in this process and at a loopback address."""
