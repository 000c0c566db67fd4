"""The Tinker protocol: training and sampling over HTTP, for programs that were written for its client."""
