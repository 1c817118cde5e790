"""The step loop, the scheduler and its policies. Imports no JAX."""
