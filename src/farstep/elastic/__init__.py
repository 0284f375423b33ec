"""Elastic actors: when to start workers, how many to use, and who holds which resource."""
