"""Reports that compare runs with the tables and figures of the paper."""
