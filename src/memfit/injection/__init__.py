"""Injection: a change carried out in the process of a script that stays as it is."""
