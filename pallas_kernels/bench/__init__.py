"""`python -m pallas_kernels.bench`: times the attention kernels. Needs only jax and numpy."""
