"""Servers: the OpenAI and Tinker APIs over the trainer's own engine, the job queue, and the live page."""
