"""Measure a run and show its numbers: metrics, plots, profiles, phases, FLOPs."""
