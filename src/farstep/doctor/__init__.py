"""The checks of `farstep doctor`: this machine, the engine, and every node, through a small run on it."""
