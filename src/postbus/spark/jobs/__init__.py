"""The jobs of the pipeline: each a pure core of DataFrame to DataFrame, and a thin runner around it."""
