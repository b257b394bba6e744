"""The report as one HTML file that loads nothing: see ``page.py``."""

from memfit.report.html.page import page

__all__ = ["page"]
