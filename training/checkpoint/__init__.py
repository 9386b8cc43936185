"""Save and load runs on any mapping; import and export models in Hugging Face layout."""
