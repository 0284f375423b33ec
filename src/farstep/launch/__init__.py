"""Launchers start workers: in this process, on this machine, or on the nodes of a cluster (see `core.Launcher`)."""
