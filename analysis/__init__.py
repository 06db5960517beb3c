"""What is made of the records: DataFrames, statistics, the roofline, tables and reports.

Reads records and the workloads' formulas; imports no stack.
"""
