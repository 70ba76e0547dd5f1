"""The loop of ``generate(use_mtp=True)``: draft, check the drafts in one forward, keep those that
the model would have chosen.

A draft is the MTP layer's likeliest token. The model then chooses each token as without drafts, by
the same logits, processors and random numbers, and each sequence goes on while it chooses its
drafts. Where it samples, that is rejection sampling (arXiv:2211.17192) of drafts with
probability 1: each is accepted with the probability that the model gives it.
"""

import copy
import functools
import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from .. import calls
from ..cache.layout import check_int
from ..patched import CACHE, text_model
from ..sharing import is_shared
from .gain import Counts, Gain
from .layer import Drafting
from .leads import Leads

logger = logging.getLogger("custom_pypto")

SCHEDULES = ("constant", "heuristic")
#: options of generate() that need another loop, and the values that do not
OTHERS = {
    "assistant_model": (None,),
    "custom_generate": (None,),
    "num_beams": (None, 1),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "output_hidden_states": (None, False),
    "use_cache": (None, True),
    "synced_gpus": (None, False),
}


@dataclass
class GenerateDraftedOutput(GenerateDecoderOnlyOutput):
    """transformers' output, with what was drafted and accepted."""

    drafts: Counts | None = None


@functools.wraps(GenerationMixin.generate)
def generate(model, below, inputs=None, generation_config=None, *args, **kwargs):
    """transformers', which drafts with the model's own MTP layer for ``use_mtp=True``.

    Args:
        below: what the model had in place of transformers'; None: nothing.
    """

    def option(name: str):
        found = kwargs.get(name)
        for config in (generation_config, model.generation_config):
            found = getattr(config, name, None) if found is None else found
        return found

    if option("use_mtp"):
        kwargs["custom_generate"] = Decoding.of(model, option, args, kwargs)
        kwargs["use_mtp"] = False  # transformers would look for a model of MTP layers
        if generation_config is not None:
            generation_config = copy.copy(generation_config)
            generation_config.use_mtp = None
    run = functools.partial(type(model).generate, model) if below is None else below
    return run(inputs, generation_config, *args, **kwargs)


def check_no_mtp(use_mtp) -> None:
    """Rejects ``use_mtp`` for a model without the layer."""
    if use_mtp:
        raise ValueError(
            "generate: use_mtp must be False for a model without its MTP layer, got True; load it "
            "with models.load(path, mtp=True)"
        )


class Decoding:
    """What ``generate()`` calls in place of its own loop.

    Args:
        drafts: for each forward.
        adaptive: whether there are none while they do not pay.
        streamer: of the caller.
    """

    def __init__(self, drafts: int, adaptive: bool, streamer):
        self.drafts, self.adaptive, self.streamer = drafts, adaptive, streamer

    @classmethod
    def of(cls, model, option, args: tuple, kwargs: dict) -> "Decoding":
        """From the options of a ``generate()``.

        Raises:
            TypeError, ValueError: names an option that another loop needs, or a wrong number.
        """
        if args:
            raise TypeError(
                "generate: with use_mtp all arguments behind generation_config must have names, "
                f"got {len(args)} without"
            )
        for name, values in OTHERS.items():
            if (got := option(name)) not in values:
                shown = got if isinstance(got, (bool, int)) else f"a {type(got).__name__}"
                raise ValueError(
                    f"generate: {name} must be {values[-1]} with use_mtp, got {shown}; omit one of "
                    "them"
                )
        if text_model(model)._custom_pypto.context_parallel:
            raise ValueError(
                "generate: use_mtp must be False for ranks that share prompts "
                "(context_parallel=True), got True; omit it"
            )
        count = 1 if (count := option("num_assistant_tokens")) is None else count
        check_int("generate: num_assistant_tokens", count)
        if count < 1:
            raise ValueError(f"generate: num_assistant_tokens must be at least 1, got {count}")
        if (schedule := option("num_assistant_tokens_schedule") or SCHEDULES[0]) not in SCHEDULES:
            raise ValueError(
                "generate: num_assistant_tokens_schedule must be "
                f"{' or '.join(map(repr, SCHEDULES))} with use_mtp, got {schedule!r}"
            )
        if schedule == "heuristic" and is_shared(model):
            raise ValueError(
                "generate: num_assistant_tokens_schedule must be 'constant' for ranks that share a "
                "model, each of which would measure other times, got 'heuristic'; omit it"
            )
        return cls(count, schedule == "heuristic", kwargs.get("streamer"))

    @torch.no_grad()
    def __call__(
        self,
        model,
        input_ids: Tensor,
        logits_processor,
        stopping_criteria,
        generation_config,
        **model_kwargs,
    ):
        text, cache, ids = text_model(model), model_kwargs[CACHE], input_ids
        check_rows(cache, self.drafts)
        gain, counts = Gain(self.drafts) if self.adaptive else None, Counts()
        chooser = Chooser(generation_config, logits_processor, stopping_criteria, self.streamer)
        forward = model.__call__
        if model._valid_auto_compile_criteria(model_kwargs, generation_config):
            forward = model.get_compiled_call(generation_config.compile_config)
        # churn: the arguments of these two methods, which transformers' own loops call
        output = model._prefill(ids, generation_config, model_kwargs)
        model_kwargs.pop("logits_to_keep", None)  # of all drafts
        ids, _ = chooser.choose(ids, output.logits[:, -1])
        model_kwargs = model._update_model_kwargs_for_generation(output, model_kwargs)
        last = stopping_criteria.max_length - 2  # the last token needs no forward
        # a sequence ahead leaves the others room for their drafts
        most = -1 if go_together(text, cache) else last - self.drafts
        leads = Leads(len(ids), ids.size(1) - 1, most, counts)
        leads.pads = chooser.pads_of_ended()
        with Drafting(model, text, cache) as drafting:
            while chooser.goes_on:
                begin = time.perf_counter()
                cached, ends = max(leads.cached), leads.ends(ids)
                count = min(self.drafts if gain is None else gain.next(), last - cached)
                # with a mask and positions of all columns up to the last draft
                more = model._update_model_kwargs_for_generation(
                    {}, dict(model_kwargs), num_new_tokens=cached + 1 + count - ids.size(1)
                )
                fed = torch.stack([end[-1:] for end in ends])
                if count > 0:
                    drafts = drafting.draft(ends, more["position_ids"], count)
                    fed = torch.cat([fed, chooser.padded(drafts)], 1)
                inputs = inputs_of(model, more, ids, leads.cached, fed)
                output = forward(**inputs, return_dict=True)
                counts.add(count, int(chooser.unfinished.sum()))
                leads.add(fed, output.logits, ids.size(1))
                before = ids.size(1)
                while chooser.goes_on and leads.ready():
                    unfinished = chooser.unfinished.tolist()
                    ids, chosen = chooser.choose(ids, leads.next())
                    leads.chose(chosen, ids.size(1), unfinished)
                leads.pads = chooser.pads_of_ended()
                leads.settle(ids.size(1), not chooser.goes_on)
                drafting.keep(leads.take_removed())
                tokens = ids.size(1) - before
                model_kwargs = model._update_model_kwargs_for_generation(
                    {}, model_kwargs, num_new_tokens=tokens
                )
                if gain is not None and count in (0, self.drafts):
                    seconds = time.perf_counter() - begin
                    if gain.add(count, tokens, seconds) and gain.losses == 1:
                        logger.warning("generate: %s", gain)
            drafting.finish(ids, model_kwargs["position_ids"])
        if self.streamer is not None:
            self.streamer.end()
        if not generation_config.return_dict_in_generate:
            return ids
        return GenerateDraftedOutput(
            sequences=ids,
            scores=chooser.scores,
            logits=chooser.logits,
            drafts=counts,
            **{CACHE: cache},
        )


def inputs_of(model, kwargs: dict, ids: Tensor, cached: list[int], fed: Tensor) -> dict:
    """The arguments of a forward over ``fed [B, S]``, behind the ``cached`` columns of each
    sequence.

    Args:
        kwargs: of ``generate()``'s loop, with a mask and positions of all columns.
        ids: ``[B, n]``.
    """
    columns = ids.new_tensor(cached)[:, None] + torch.arange(fed.size(1), device=ids.device)
    positions = kwargs["position_ids"].expand(len(ids), -1).gather(1, columns)
    most = max(cached)
    known = nn.functional.pad(ids, (0, max(0, most - ids.size(1))))[:, :most]
    return model.prepare_inputs_for_generation(
        torch.cat([known, fed], 1),
        next_sequence_length=fed.size(1),
        **kwargs | {"position_ids": positions},
    )


class Chooser:
    """Chooses tokens as ``generate()`` does without drafts."""

    def __init__(self, config, processors, criteria, streamer):
        self.config, self.processors, self.criteria = config, processors, criteria
        self.streamer, self.goes_on = streamer, True
        self.pads = any(hasattr(one, "eos_token_id") for one in criteria)
        self.unfinished: Tensor | None = None
        wanted = config.return_dict_in_generate
        self.scores: tuple | None = () if wanted and config.output_scores else None
        self.logits: tuple | None = () if wanted and config.output_logits else None

    def choose(self, ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """``ids [B, n]`` with the next token of each sequence, and these tokens ``[B]``.

        Args:
            logits: ``[B, vocabulary]``, after the last of ``ids``.
        """
        if self.unfinished is None:
            self.unfinished = torch.ones(len(ids), dtype=torch.long, device=ids.device)
        tokens = self.token(ids, logits.to(copy=True, dtype=torch.float32))
        ids = torch.cat([ids, tokens[:, None]], 1)
        self.unfinished &= ~self.criteria(ids, self.scores)
        if self.streamer is not None:
            self.streamer.put(tokens.cpu())
        self.goes_on = bool(self.unfinished.max() != 0)
        return ids, tokens

    def token(self, ids: Tensor, logits: Tensor) -> Tensor:
        """The next token of each sequence, ``[B]``."""
        scores = self.processors(ids, logits)
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        if self.config.do_sample:
            tokens = torch.multinomial(nn.functional.softmax(scores, -1), 1).squeeze(1)
        else:
            tokens = scores.argmax(-1)
        return self.padded(tokens[:, None]).squeeze(1)

    def pads_of_ended(self) -> list[int | None]:
        """The token that pads each sequence that has ended; None: it goes on."""
        if not self.pads:
            return [None] * len(self.unfinished)
        pad = int(self.config._pad_token_tensor)
        return [None if goes_on else pad for goes_on in self.unfinished.tolist()]

    def padded(self, tokens: Tensor) -> Tensor:
        """``tokens [B, n]``, but padding for sequences that have ended."""
        if not self.pads:
            return tokens
        padding = self.config._pad_token_tensor.to(tokens.device)
        return torch.where(self.unfinished[:, None] != 0, tokens, padding)


def go_together(text, cache) -> bool:
    """Whether no sequence may be ahead of another: states forget no tokens of one alone, rings no
    more than they can spare, and a record has the same tokens of all."""
    bound = cache.store.recurrent or cache.store.spare_of_rings is not None
    return bool(bound or calls.around(text))


def check_rows(cache, drafts: int) -> None:
    """Rejects a cache without rows of the MTP layer, or whose rings cannot forget the drafts."""
    if cache.sequences.hidden is None:
        raise ValueError(
            f"generate: {CACHE} must have rows of the MTP layer with use_mtp, got one without; "
            "create it from the model as it is loaded"
        )
    spare = cache.store.spare_of_rings
    if spare is not None and drafts > spare:
        raise ValueError(
            f"generate: num_assistant_tokens must be at most {spare} (tokens that the cache's "
            f"rings can forget), got {drafts}"
        )
