"""What tests of shared selections have in common: patterns, models, and who selects for whom."""

import pytest
from tiny import ALL_KINDS, marks_of, tiny_model

from custom_pypto import models
from custom_pypto.models.patched import patched_attentions, text_model

# of the layers that attend to selected positions; those of GLM-5 and its kin that have no indexer
# are S in any case
PATTERNS = {
    "deepseek_v32": "FSS",
    "axk2": "FSF",
    "glm_moe_dsa": "FSS",
    "hy_v4": "FSS",
    "hy_v4_vl": "FSS",
    "dots3_note": "FS",
    "deepseek_v4": "FS",
    "glm5_next": "FSSS",
    "mistral_large4": "FSSF",
}
KINDS = [pytest.param(kind, marks=marks_of(kind)) for kind in ALL_KINDS]


def patched(kind, pattern=None, model=None, **options):
    """A model that shares as PATTERNS says, or as ``pattern`` does."""
    options = {"block_size": 16, "index_topk_pattern": pattern or PATTERNS[kind]} | options
    return models.use_custom_pypto(model or tiny_model(kind), **options)


def sources(model):
    """By layer that attends to selected positions: the one that selects them."""
    text = text_model(model)
    own = {i: i for i, x in patched_attentions(text).items() if x.selects}
    return dict(sorted((own | text._custom_pypto.sharing.sources).items()))


def indexed(kind):
    """Layers with an indexer."""
    model = models.use_custom_pypto(tiny_model(kind))
    return [i for i, x in patched_attentions(text_model(model)).items() if x.selects]
