"""The report as one HTML file that loads nothing: see ``page.py``."""

from memfit.report.html.page import run_report_html

__all__ = ["run_report_html"]
