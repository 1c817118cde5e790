"""Pictures of what an engine does, for notebooks and papers: its memory, its prefix tree, its requests over time."""
