"""Models by name: their shapes and, for some, where real weights come from.

Package data, one YAML file a model.
"""
