"""The embedded model, and how it is made from scratch."""
