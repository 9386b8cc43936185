"""Several processes as one: the mesh, what lies where on it, pipelines, context parallel, who is missing."""
