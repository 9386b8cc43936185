"""Continued pre-training of dense and upcycled models, PyTorch-native. Runs from the clone: `python -m training CONFIG`."""
