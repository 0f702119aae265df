"""Servers of applications that callers make themselves."""
