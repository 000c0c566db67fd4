"""ART's module of this name: `from lowmem_grpo.agents.local import LocalBackend`."""

from lowmem_grpo.agents.backend import LocalBackend

__all__ = ["LocalBackend"]
