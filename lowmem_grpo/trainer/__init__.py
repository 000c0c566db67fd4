"""The trainers, and the parts that they share."""
