"""Tracking over commits with airspeed velocity: records -> asv's result files -> a site.

Records are the truth; asv's files are derived from them, by the same code whether the records were measured here or
elsewhere. The suites, which say what asv calls a case, are in ``benchmarks.suites``.
"""
