"""Served inference: an acting server holds the only copy of the policy, and acts for workers of one or all nodes.

Each worker exchanges observations and actions with the server through a `Mailbox`. On one host, the mailboxes of
several workers are in one shared memory (`Arena`), worker and server wake each other with doorbells, and a Unix socket
carries what is rare: joining, saved state, errors. Over the network, each side has its own copy of the mailbox, and
messages carry the contents.

This folder has the worker's side, and the mailbox and messages that both sides use. `serving/` has the server's side.
"""
