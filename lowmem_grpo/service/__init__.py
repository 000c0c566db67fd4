"""Chat completions in the shape of OpenAI's interface, by the trainer's own engine: in the process, and at a loopback
address."""
