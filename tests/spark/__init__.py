"""The pipeline on real Spark, over real stores."""
