"""What others measured and published, beside what penstock predicts for it."""
