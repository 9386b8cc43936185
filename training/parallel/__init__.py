"""Run one model on several processes: mesh, placement, pipelines, context parallelism, and detection of lost ranks."""
