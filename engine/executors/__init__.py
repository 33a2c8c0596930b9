"""Where stacks are trained: local processes or a cluster."""
