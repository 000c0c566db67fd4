"""Layer inputs and the embedding, kept on the host instead of the card. It needs only torch."""
