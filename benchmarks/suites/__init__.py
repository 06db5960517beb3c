"""What asv collects: suites of cases, thin views of the records. See ``_suite``."""
