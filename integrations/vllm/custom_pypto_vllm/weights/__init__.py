"""Linear layers and experts over weights that vLLM has no kernel for on a CPU."""
