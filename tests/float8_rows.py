"""A further format of cache rows, of ops that exist: latents in fp8 with a scale per row."""

import torch

from custom_pypto.rows import LatentRows
from custom_pypto.rows.parts import Part, write

FP8 = torch.float8_e4m3fn


def scaled(latent):
    """The nearest fp8 to ``[.., L]`` over a float32 scale ``[.., 1]``."""
    scale = latent.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    return (latent.float() / scale).to(FP8), scale


class Float8LatentRows(LatentRows):
    def parts(self, latent, rope):
        values, scale = Part(latent, torch.uint8), Part(1, torch.float32)
        return super().parts(latent, rope) | {"latent": values, "latent_scale": scale}

    def write(self, pools, slots, latent, rope):
        values, scale = scaled(latent)
        write(pools["latent_scale"], slots, scale)
        super().write(pools, slots, values.view(torch.uint8), rope)

    def first(self, pools, *arguments, **keywords):
        return super().first(self.dequantized(pools), *arguments, **keywords)

    def attend(self, pools, *arguments, **keywords):
        return super().attend(self.dequantized(pools), *arguments, **keywords)

    def dequantized(self, pools):
        latent = pools["latent"].view(FP8).float() * pools["latent_scale"]
        return pools | {"latent": latent.to(self.dtype)}
