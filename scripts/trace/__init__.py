"""The tracer: which files of the product a request executes, in order of first call, by process."""
