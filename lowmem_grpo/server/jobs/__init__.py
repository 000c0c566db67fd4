"""A queue of recipe runs for one GPU: jobs start when the GPU has room, and survive the server."""
