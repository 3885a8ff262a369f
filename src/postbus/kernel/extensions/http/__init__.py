"""Extension: a channel over HTTP."""
