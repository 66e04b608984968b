"""The sides of the benchmarks: the engine, PEFT, processes, samplers and pools."""
