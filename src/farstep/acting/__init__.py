"""Served inference: an acting server holds the only copy of the policy on its node and acts for the workers there.

Workers and server exchange observations and actions through a `Mailbox` in shared memory, one per worker, and wake each
other with doorbells. A Unix socket carries everything that is rare: joining, saved state, errors.
"""
