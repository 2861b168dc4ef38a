"""Where the real one keeps its extension builder."""
