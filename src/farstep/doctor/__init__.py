"""What `farstep doctor` looks at: this machine, the engine, and every node through a small run of it."""
