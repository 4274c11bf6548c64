"""Jobs of several runs: transfer with a sweep of rates, VTAB-1k, studies."""
