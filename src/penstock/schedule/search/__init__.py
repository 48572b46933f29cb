"""The best schedule found for given costs within a memory limit."""

from penstock.schedule.search.search import Found, search

__all__ = ["Found", "search"]
