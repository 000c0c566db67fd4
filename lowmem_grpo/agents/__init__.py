"""Agents in plain Python, under ART's names: `from lowmem_grpo import agents as art`.

Names load when they are first used.
"""
