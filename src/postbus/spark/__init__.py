"""The data pipeline on Spark: the data source, the matcher on Arrow batches, the jobs and the report."""
