"""Extension: a chat in the terminal."""
