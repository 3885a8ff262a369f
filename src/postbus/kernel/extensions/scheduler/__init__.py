"""Extension: what happens later, once or again and again."""
