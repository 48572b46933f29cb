"""The numbers that the project lives by, and those of others on the same work."""
