"""Parts: knowledge as experts of their own. Make one from documents, join several to a base, and take one out."""
