"""The problems that the recipes generate."""
