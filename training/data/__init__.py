"""Turn text into token shards, and shards into batches."""
