"""Device kernels over paged key/value memory. Knows JAX; knows nothing of paged_jax."""
