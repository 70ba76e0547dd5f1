"""The modes of torchair in which programs compile; `run.sh atlas` reads them before torch."""

MODES = ["max-autotune", "reduce-overhead", "npugraph_ex"]
