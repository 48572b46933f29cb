"""The device of a rank: its streams, copies from and to the host, memory, offloading."""
