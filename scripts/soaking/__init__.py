"""A soak: real nodes under Poisson faults, judged at the end (`scripts/soak`)."""
