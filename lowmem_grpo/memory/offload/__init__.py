"""Offload layer inputs and the embedding to the host. The package needs only torch."""
