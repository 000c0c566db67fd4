"""What `lowmem-grpo new` does: it looks at the user's data, and fills a template with a recipe for it."""
