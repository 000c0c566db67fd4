"""Chat completions in OpenAI's shape by the trainer's own engine, in the process and at a loopback address."""
