"""From files to batches: documents, token ids, rows, and the rows of each step."""
