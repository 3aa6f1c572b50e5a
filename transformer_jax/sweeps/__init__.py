"""Sweeps: a config and points that differ from it, trained by child processes, compared in one table."""
