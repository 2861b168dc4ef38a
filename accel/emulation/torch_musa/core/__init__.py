"""The real package's inner paths, by which its vendor's own wrapper reaches it."""
