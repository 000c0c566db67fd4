"""How many kernels are launched, and what a call costs on the host."""
