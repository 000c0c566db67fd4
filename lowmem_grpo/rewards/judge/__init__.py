"""A language model as a judge of completions. Users take it from `lowmem_grpo.rewards`; docs/judge.md explains it."""
