"""Blocks, block tables and prefix caches. Imports no JAX."""
