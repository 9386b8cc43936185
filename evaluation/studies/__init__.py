"""Arms x seeds, trained and judged: plan (what is trained), running, judging, page, study (the command)."""
