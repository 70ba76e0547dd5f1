"""Draws the samples of bench_soak.py, JSON on the standard input: soak_plot.py FILE.png."""

import json
import sys

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402

samples = json.load(sys.stdin)
figure, axes = plt.subplots(2, sharex=True, figsize=(8, 5))
minutes = [sample["minute"] for sample in samples]
for axis, name, label in zip(
    axes, ("mib", "running"), ("resident memory, MiB", "requests running"), strict=True
):
    axis.plot(minutes, [sample[name] for sample in samples])
    axis.set_ylabel(label)
    axis.set_ylim(bottom=0)
axes[-1].set_xlabel("minutes")
figure.tight_layout()
figure.savefig(sys.argv[1], dpi=120)
