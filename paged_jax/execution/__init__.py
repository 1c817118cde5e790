"""Plans made into batches, and batches run."""
