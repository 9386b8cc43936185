"""Code that we copy into output folders, for models that no architecture of transformers can hold."""
