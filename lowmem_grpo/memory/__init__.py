"""Memory: planning it, measuring it, offloading, and recovering when it runs out."""
