"""Metrics, completion tables, model cards, trackers."""
