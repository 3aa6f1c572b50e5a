"""Scores of a model on a split: likelihood, translation scores, exact match."""
