"""The best schedule that can be found for given costs and a given limit of memory."""

from penstock.schedule.search.search import Found, search

__all__ = ["Found", "search"]
