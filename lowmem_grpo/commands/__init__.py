"""Commands of `lowmem-grpo`, a file each. They import what they need when they run: `--help` stays light."""
