"""Code that is shipped inside output folders, for models that no architecture of transformers can hold."""
