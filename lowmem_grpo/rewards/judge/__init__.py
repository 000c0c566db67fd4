"""A language model as judge of completions. `lowmem_grpo.rewards` offers what users need; docs/judge.md explains it."""
