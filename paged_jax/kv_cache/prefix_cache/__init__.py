"""Prefix caches, one file each."""
