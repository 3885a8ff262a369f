"""The command line over a real store: what it prints, what it refuses, and with which exit code."""
