"""The commands of `lowmem-grpo`. A command imports heavy libraries only when it runs."""
