"""How fast engines sample, and how far they agree with the trainer."""
