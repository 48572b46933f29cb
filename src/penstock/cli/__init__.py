"""The command `penstock`: one file a command; main.py has the entry point."""
