"""The engine: workers, buffers, judge, timing, records, sessions."""
