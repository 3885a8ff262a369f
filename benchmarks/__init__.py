"""Benchmarks of Postbus against the raw ceiling and its peers. Run by ``python -m benchmarks``; see README.md."""
