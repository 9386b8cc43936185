"""What a resume needs, on disk and on any mapping; models in and out in Hugging Face layout."""
