"""The inbox room."""
