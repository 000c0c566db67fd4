"""Make the models in the package from scratch."""
