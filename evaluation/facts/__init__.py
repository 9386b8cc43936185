"""Ask a model facts: world (made-up people, places and events), cloze (a user's documents), suite (the files), asking
(the scores), results (the files and the table of a model)."""
