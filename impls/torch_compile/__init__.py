"""Functions of torch, captured by Dynamo and compiled: by Inductor, or, as a control, without generating any code."""
