"""Programs of others against `lowmem-grpo serve`."""
