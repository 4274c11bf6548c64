"""Jobs with several runs: transfer with a sweep of learning rates, VTAB-1k, studies."""
