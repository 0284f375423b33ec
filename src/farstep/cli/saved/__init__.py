"""Run folders that commands read: their options, whether to trust them, and videos of their policies."""
