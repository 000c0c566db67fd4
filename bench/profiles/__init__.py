"""Top kernels, idle gaps and copies of a step."""
