"""A device nobody here has: what a step costs on it, and the models that the simulator knows. Imports no JAX."""
