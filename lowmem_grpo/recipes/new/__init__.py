"""What `lowmem-grpo new` writes: a look at the user's data, and a recipe for it out of a template."""
