"""The parts of `ClusterEnv` and `make_vec` behind their public methods."""
