"""The sides that the benchmarks compare: the engine, PEFT, processes, samplers and pools."""
