"""TVM: schedules written by hand, found by MetaSchedule and applied through Relax, compiled by TVM's LLVM backend."""
