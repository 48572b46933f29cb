"""The numbers that the project lives by, beside torch.distributed.pipelining on the same work."""
