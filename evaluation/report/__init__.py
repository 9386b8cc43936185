"""The page that shows what was found."""
