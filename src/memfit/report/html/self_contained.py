"""The parts of a page that loads nothing: its assets, and the policy that permits no others."""

import base64
import hashlib
from importlib.resources import files


def asset(name: str) -> str:
    """Return the text of a file in ``assets``."""
    return files("memfit.report.html").joinpath("assets", name).read_text(encoding="utf-8")


def policy(style: str, script: str = "") -> str:
    """Return a security policy that allows only this style and this script, or no script.

    Source: W3C, Content Security Policy Level 3, hashes (2.3.1) and ``default-src`` (6.1.3).

    >>> policy("p { margin: 0 }")[:59]
    "default-src 'none'; script-src 'none'; style-src 'sha256-7I"
    """
    scripts = f"'{_hash(script)}'" if script else "'none'"
    return (
        f"default-src 'none'; script-src {scripts}; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
