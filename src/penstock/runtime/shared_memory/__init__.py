"""Messages between ranks of one host, through shared memory. Begin at messages.py."""
