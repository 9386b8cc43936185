"""Continued pre-training of dense and upcycled models, PyTorch-native. It runs from the clone."""
