"""The models in the package, and how they are made from scratch."""
