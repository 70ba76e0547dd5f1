"""Loading takes the memory of the model and of one shard; a model that does not fit is rejected
before anything is read."""

import io
import math
import sys

import psutil
import pytest
import torch
from processes import PAGES, in_a_process, peak_of
from published import V4, published, save_sparse, shards_of, stored_v4, write_published
from tiny import KINDS, YARN, tiny_config, token_ids
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DeepseekV32Config

from custom_pypto import models
from custom_pypto.models.memory import HUGE, empty


def peak_of_loading(small, large, weights=None):
    models.load(small, weights=weights)  # has imported all there is to import
    loaded = []
    peak = peak_of(lambda: loaded.append(models.load(large, weights=weights)))
    return peak, sum(tensor.nbytes for tensor in loaded[0].state_dict().values())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "kind, quantized",
    [
        pytest.param(KINDS[0], True, id="fp8"),
        pytest.param(V4, True, id="fp4", marks=pytest.mark.slow),
        pytest.param(KINDS[0], False, id="bf16", marks=pytest.mark.slow),
    ],
)
def test_loading_takes_no_more_than_the_model_and_one_shard(kind, quantized, tmp_path):
    small = published(tmp_path / "small", kind)
    sizes = dict(hidden_size=1024, moe_intermediate_size=512, n_routed_experts=16)
    path = published(tmp_path / "quantized", kind, **sizes)
    if not quantized:
        models.load(path).save_pretrained(path := tmp_path / "bf16", max_shard_size="20MB")
    peak, size = in_a_process(peak_of_loading, small, path)
    shard = max(file.stat().st_size for file in path.glob("*.safetensors"))
    assert size > 100e6 and shard < size / 3
    # a few MB less than the model may do: those that the small one has left
    most = size + shard + PAGES
    assert 0.95 * size < peak <= most, f"{peak / 1e6} MB for {size / 1e6} + {shard / 1e6}"


@pytest.mark.parametrize("weights", [pytest.param("int8", marks=pytest.mark.slow), "stored"])
def test_stored_weights_take_no_more_than_the_model_and_one_shard(weights, tmp_path):
    sizes = dict(hidden_size=1024, moe_intermediate_size=512, n_routed_experts=12)
    small = published(tmp_path / "small", moe_intermediate_size=128)
    path = published(tmp_path / "large", **sizes)
    peak, size = in_a_process(peak_of_loading, small, path, weights)
    plain = sum(x.nbytes for x in models.load(path).state_dict().values())
    shard = max(file.stat().st_size for file in path.glob("*.safetensors"))
    most = size + shard + PAGES
    assert 0.9 * size < peak <= most < plain, f"{peak / 1e6} MB, {size / 1e6} + {shard / 1e6}"
    assert size <= 0.6 * plain


# ---- a model that does not fit ------------------------------------------------------------------


def deepseek_v32(**changes):
    yarn = YARN | {"factor": 40.0, "original_max_position_embeddings": 4096}
    return DeepseekV32Config(rope_parameters=yarn, **changes)


def deepseek_v4_flash(**changes):
    yarn = {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1}
    published = dict(compress_ratios=[0, 0, *[4, 128] * 20, 4, 0], num_hash_layers=3)
    rope_scaling = yarn | {"original_max_position_embeddings": 65536}
    return DeepseekV4Config(rope_scaling=rope_scaling, **published | changes)


LARGE = dict(n_routed_experts=16, moe_intermediate_size=32768)
LARGE_V4 = dict(n_routed_experts=8, moe_intermediate_size=65536)


@pytest.mark.parametrize(
    "make, changes, needs",
    [
        # what all layers need, and the first ones
        pytest.param(
            deepseek_v32, LARGE, {None: "1.42TB", 31: "689GB"}, id="deepseek_v32-of-large-experts"
        ),
        pytest.param(
            deepseek_v4_flash,
            LARGE_V4,
            {None: "636GB", 21: "312GB"},
            id="deepseek_v4-of-large-experts",
            marks=pytest.mark.slow,
        ),
        # 93,000 and 69,000 tensors; routers are float32 from transformers 5.24 on: 653
        pytest.param(
            deepseek_v32,
            {},
            {None: "1.34TB", 31: "65[23]GB"},
            id="deepseek_v32-as-published",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            deepseek_v4_flash,
            {},
            {None: "569GB", 21: "279GB"},
            id="deepseek_v4-as-published",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_model_that_does_not_fit_is_rejected_before_anything_is_read(
    make, changes, needs, tmp_path
):
    """The 671 billion weights of DeepSeek-V3.2 and the 284 billion of V4-Flash, as far as their
    headers go."""
    if psutil.virtual_memory().available > 270e9:
        pytest.skip("this machine has the memory")
    # scales of fp4 are a byte for 32 values, and load() reads them before it asks for memory
    with torch.device("meta"):
        write_published(tmp_path, make(**changes), save=save_sparse, experts="fp8")
    on_disk = sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir())
    assert on_disk < 100e6 < 159e9 < sum(file.stat().st_size for file in tmp_path.iterdir())
    for layers, needed in needs.items():
        with pytest.raises(MemoryError) as error:
            models.load(tmp_path, num_hidden_layers=layers)
        error.match(
            rf"load: out of memory: the model needs {needed} in bfloat16, this machine has "
            r"[\d.]+[GM]B free; load fewer layers with num_hidden_layers, or use more devices"
        )


@pytest.mark.slow
def test_a_synthetic_deepseek_v4_flash_has_as_many_tensors_as_the_published_one():
    config = deepseek_v4_flash()
    with torch.device("meta"):
        shards = shards_of(DeepseekV4ForCausalLM(config))
        names = [
            len(stored_v4(name, shape, config, "fp4"))
            for shard in shards
            for name, shape in shard.items()
        ]
    assert sum(names) == 69187


def stored_deepseek_v4_flash(path):
    """Size, peak of loading, and what the model says."""
    loaded = []
    peak = peak_of(lambda: loaded.append(models.load(path, weights="stored")))
    size = sum(tensor.nbytes for tensor in loaded[0].state_dict().values())
    tokens = loaded[0].generate(token_ids(1, 40), max_new_tokens=8, do_sample=False)
    model = models.load(path, weights="stored", dtype=torch.float32)
    with torch.no_grad():
        return size, peak, tokens, model(tokens).logits


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_deepseek_v4_flash_computes_in_its_published_form(tmp_path):
    """Its widths, in a layer of each type with 8 of the 256 experts and few words."""
    sizes = dict(num_hidden_layers=3, n_routed_experts=8, vocab_size=1024, num_hash_layers=1)
    config = deepseek_v4_flash(compress_ratios=[0, 4, 128, 0], **sizes)
    write_published(tmp_path, config)
    size, peak, tokens, got = in_a_process(stored_deepseek_v4_flash, tmp_path)
    plain = models.load(tmp_path, dtype=torch.float32)
    of_bfloat16 = sum(tensor.numel() * 2 for tensor in plain.state_dict().values())
    shard = max(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert of_bfloat16 > 1.5e9
    assert size < 0.53 * of_bfloat16 and peak < size + shard, (size, peak, of_bfloat16)
    assert tokens.shape == (1, 48)
    with torch.no_grad():
        want = plain(tokens).logits
    assert (got - want).norm() < 1e-3 * want.norm(), (got - want).norm() / want.norm()


@pytest.mark.ascend_host
def test_a_model_that_does_not_fit_on_the_device_is_rejected(tmp_path):
    with torch.device("meta"):
        write_published(tmp_path, tiny_config(vocab_size=10**10), save=save_sparse)
    with pytest.raises(MemoryError, match=r"needs 3\.84TB in bfloat16, npu has 17\.2GB free"):
        models.load(tmp_path, device="npu")


def of_experts(path, billions):
    """A checkpoint in fp8 with so many billion weights, as far as its headers go."""
    width = int(billions * 1e9 / (2 * 3 * 8 * 1024)) // 128 * 128  # layers, matrices, experts
    sizes = dict(hidden_size=1024, n_routed_experts=8, moe_intermediate_size=width)
    with torch.device("meta"):
        write_published(path, tiny_config(**sizes), save=save_sparse, experts="fp8")
    return path


STORED = r"'stored' \(as in the files, without rounding\)"
# billions of weights for each GB that is free: 2 bytes each, 1.0 in fp8 and int8, 0.5 in int4
SMALLER = {
    "all": (0.75, None, f"bfloat16, .*more devices, or pass weights={STORED} or 'int8' or 'int4'$"),
    "int4-alone": (1.5, None, "bfloat16, .*more devices, or pass weights='int4'$"),
    "less-than-int8": (1.5, "int8", "weights in int8, .*more devices, or pass weights='int4'$"),
    "none": (3, None, "bfloat16, .*or machines .*: no format of weights fits here$"),
    "none-but-int4": (3, "int4", "weights in int4, .*: no format of weights fits here$"),
}


@pytest.mark.parametrize("billions, weights, says", SMALLER.values(), ids=SMALLER)
def test_a_model_that_does_not_fit_names_the_formats_that_do(billions, weights, says, tmp_path):
    path = of_experts(tmp_path, billions * psutil.virtual_memory().available / 1e9)
    with pytest.raises(MemoryError, match=f"[GT]B in {says}"):
        models.load(path, weights=weights)


@pytest.mark.skipif(sys.platform != "linux", reason="pages of other systems are not chosen")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("size, beside", [(2, 0), (3, 0), (0.75, 0), (0.3, 9), (9.2, 0)])
def test_a_large_tensor_begins_with_a_large_page_and_has_no_memory_but_its_own(dtype, size, beside):
    shape = math.ceil(size * HUGE / dtype.itemsize / 6) * 2, 3
    tensor = empty(shape, dtype, beside=beside * HUGE)
    assert tensor.data_ptr() % HUGE == 0 and tensor.storage_offset() == 0
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    bits = tensor.view(torch.uint8).fill_(7)
    assert (torch.load(io.BytesIO(saved(tensor))).view(torch.uint8) == bits).all()


@pytest.mark.skipif(sys.platform != "linux", reason="pages of other systems are not chosen")
@pytest.mark.parametrize("size, beside", [(0.7, 0), (0.3, 3), (0.2, 99), (1.1, 0)])
def test_little_of_a_large_page_stays_unused(size, beside):
    """Where all of a page is written, another process could not have the rest of it."""
    before = psutil.Process().memory_info().rss
    tensors = [
        empty((int(size * HUGE),), torch.uint8, beside=beside * HUGE).fill_(1) for _ in range(16)
    ]
    grown = psutil.Process().memory_info().rss - before
    assert grown < 16 * (tensors[0].nbytes + HUGE // 4)


def saved(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


@pytest.mark.parametrize("numbers", [2**44, 2**62])
def test_too_little_memory_is_an_error_of_torch(numbers):
    with pytest.raises(torch.OutOfMemoryError):
        empty((numbers,), torch.float32)


def test_a_tensor_of_no_memory_stays_one():
    assert empty((2**30, 4), torch.int8, torch.device("meta")).device.type == "meta"
    with FakeTensorMode():
        assert is_fake(empty((2**30, 4), torch.int8))
