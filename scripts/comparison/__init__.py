"""`scripts/compare`: a swarm against the same training in one process, on the same data, from the same S_0."""
