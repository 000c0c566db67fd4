"""A queue of recipes for one card: they wait, start when it is free, and outlive the server."""
