"""One module per model family, found by name (docs/adding-a-family.md)."""
