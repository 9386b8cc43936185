"""The report: report (the command), facts (what it knows), page (as HTML), draw (its pictures)."""
