"""The live page over HTTP: who may see it, what is shown, what its buttons do."""
