"""Filters that decide, group by group, what is trained on."""
