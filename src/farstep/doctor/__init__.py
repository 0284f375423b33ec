"""The checks of `farstep doctor`: of this machine, of the engine, and, through a small run, of every node."""
