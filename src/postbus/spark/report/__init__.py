"""The report: tables over the history as DataFrames, and one page with plots that a person wants to look at."""
