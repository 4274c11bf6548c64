"""Reports that put runs beside the tables and figures of the paper."""
