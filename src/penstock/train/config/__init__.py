"""The config of a run: its sections, the types of their values, and how a file becomes one."""
