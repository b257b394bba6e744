"""The report as one HTML file that loads nothing: see ``run_page.py``."""

from memfit.report.html.run_page import run_report_html

__all__ = ["run_report_html"]
