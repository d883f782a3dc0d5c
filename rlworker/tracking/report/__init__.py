"""Pages that show runs: ``report.html`` of one, and a comparison of several."""
