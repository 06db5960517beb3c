"""What several stacks share: arrays, settings, programs, the reading of machine code."""
