"""Distributed locks with fencing tokens: the database itself refuses a late write."""
