"""What is measured of a run and how it is shown: metrics, plots, profiles, phases, FLOPs."""
