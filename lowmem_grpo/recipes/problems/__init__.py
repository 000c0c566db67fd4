"""The problems that recipes generate or bring along."""
