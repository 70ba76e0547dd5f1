"""What torchao, optimum-quanto, bitsandbytes and compressed-tensors make of a ``nn.Linear``.

Known by the names of their classes, since none need be installed.
"""

import copy

from torch import Tensor, nn

# torchao's subclasses of a weight: what is None if the weight alone is quantized; the first is in
# every version of the class
TORCHAO = {
    "Int8Tensor": ("act_quant_kwargs", "act_pre_scale"),
    "Float8Tensor": ("act_quant_kwargs",),
    "IntxUnpackedToInt8Tensor": ("activation_quantization",),
}
QUANTO = "optimum.quanto.nn.qlinear"
BITSANDBYTES = "bitsandbytes.nn.modules"
# how each leaves a module alone
EXCLUDING = {
    "torchao": '`modules_to_not_convert=[".*kv_b_proj.*", "lm_head"]` of TorchAoConfig, or '
    "`filter_fn` of quantize_",
    "optimum-quanto": '`exclude="*kv_b_proj"` of quantize, or '
    '`modules_to_not_convert=["kv_b_proj", "lm_head"]` of QuantoConfig',
    "bitsandbytes": '`llm_int8_skip_modules=[".*kv_b_proj.*", "lm_head"]` of BitsAndBytesConfig',
}


def quantizer_of(projection: nn.Module) -> str | None:
    """The library that has quantized ``projection``, or None."""
    module = type(projection).__module__
    if module == QUANTO:
        return "optimum-quanto"
    if module == BITSANDBYTES:
        return "bitsandbytes"
    # it also replaces the forward of a module that it is told to ignore
    forward = getattr(projection.__dict__.get("forward"), "__func__", None)
    of_forward = getattr(forward, "__globals__", {}).get("__name__", "")
    if "quantization_scheme" in projection.__dict__ or of_forward.startswith("compressed_tensors."):
        return "compressed-tensors"
    weight = projection._parameters.get("weight")
    return "torchao" if type(weight).__module__.startswith("torchao.") else None


def quantizes_weight_alone(projection: nn.Module, library: str) -> bool:
    """Whether the outputs are those of a plain weight: the input is multiplied as it is."""
    weight = projection._parameters.get("weight")
    if library == "torchao":
        names = TORCHAO.get(type(weight).__name__, ())
        if type(projection) is not nn.Linear or not names or not hasattr(weight, names[0]):
            return False
        return all(getattr(weight, name, None) is None for name in names)
    if library == "optimum-quanto":
        # one that is not frozen quantizes its weight anew in each forward
        return projection.frozen and projection.activation_qtype is None
    if library == "bitsandbytes":  # Linear8bitLt quantizes its input
        return getattr(weight, "quant_state", None) is not None
    return False


def dequantized_projection(projection: nn.Module, library: str) -> Tensor:
    """The dequantized weight of a projection for which :func:`quantizes_weight_alone` is true."""
    if library != "bitsandbytes":
        return projection.weight.detach().dequantize()
    from bitsandbytes.functional import dequantize_4bit

    if getattr(projection.weight.quant_state, "packing_format_for_cpu", False):
        projection = copy.deepcopy(projection)
        projection.state_dict()  # unpacks what a forward has packed for AVX512-BF16
    return dequantize_4bit(projection.weight.data, projection.weight.quant_state)


def exclusion(library: str) -> str:
    """What a user does so that ``library`` leaves ``kv_b_proj`` plain."""
    if library == "compressed-tensors":
        return (
            "load the model with quantization_config=CompressedTensorsConfig(dequantize=True), "
            "since the library replaces the forward of modules in `ignore`, too"
        )
    return f"leave it out of the quantization ({EXCLUDING[library]})"
