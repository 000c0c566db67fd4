"""From prompts to scored groups: sampling, parity check, scoring, dynamic sampling and replay; and evaluation."""
