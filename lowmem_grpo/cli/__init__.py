"""The commands of `lowmem-grpo`, one file each. Each imports heavy libraries only when it runs."""
