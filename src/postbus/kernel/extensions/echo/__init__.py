"""Extension: answers with what it was told."""
