"""The report as one HTML file that loads nothing: see ``page.py``."""

from memfit.report.html.page import report_page

__all__ = ["report_page"]
