"""Served inference: an acting server holds the only copy of the policy, and acts for the workers of its node or of all.

Workers and server exchange observations and actions through a `Mailbox`, one per worker. On one host it is in shared
memory, with those of other workers (`Arena`), and they wake each other with doorbells; a Unix socket carries everything
that is rare: joining, saved state, errors. Over the network, both have a mailbox, and messages carry what is written
into it.

This folder has the worker's side, and the mailbox and messages that both sides use. `serving/` has the server's side.
"""
