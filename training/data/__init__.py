"""Text to token shards, shards to batches."""
