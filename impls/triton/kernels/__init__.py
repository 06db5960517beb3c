"""What imports Triton and torch: kernels, and the program that launches them. Imported inside ``prepare`` only."""
