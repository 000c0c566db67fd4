"""Servers: OpenAI's interface and Tinker's over the trainer's own engine, jobs, and the live page."""
