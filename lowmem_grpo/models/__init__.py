"""The trained model: layers on our kernels, packed micro-batches in, log-probabilities out."""
