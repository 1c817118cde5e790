"""Reading models from files."""
