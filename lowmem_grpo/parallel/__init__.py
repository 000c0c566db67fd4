"""A run in several processes, each with a card of its own: which of them this one is, and what they tell each other.

Every rank holds the whole model and the same state of the run. Each samples, scores and trains a share of each step's
groups. What was sampled is gathered, so that every rank knows all of it and decides the same; gradients are summed.
Nothing else of the package knows ranks but by what `Ranks` offers, which in one process does nothing.
"""
