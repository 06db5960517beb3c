"""The decision report: one self-contained page, Markdown for a pull request, JSON under a schema.

``model`` says what a report holds (as JSON values, described by ``schema.json``); ``page`` and ``markdown`` are two
views of it; ``words`` are the sentences and figures that both use. From records alone, on any machine: no stack is
imported, nothing is fetched, and whatever the records say stays text.
"""

from analysis.report.writing import FILES, write

__all__ = ["FILES", "write"]
