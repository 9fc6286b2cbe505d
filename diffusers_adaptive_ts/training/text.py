"""The text space of a Stable Diffusion pipeline: its tokenizer and frozen encoder, used as its prompts are encoded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.logging import get_logger

# Captions of one call of the encoder, however many are asked for.
CHUNK = 32
_TOKENIZED = 1024
# The configuration's own book-keeping says nothing about what is computed.
_NOT_COMPUTED = ("architectures", "transformers_version", "dtype", "torch_dtype")
logger = get_logger(__name__)


class TextSpace:
    """A tokenizer and a text encoder in evaluation mode, as `StableDiffusionPipeline.encode_prompt` uses them.

    Attributes:
        max_length: L, the tokens that every caption is padded or cut to.
        hidden_size: D, the width of an embedding.
    """

    def __init__(self, tokenizer: Any, encoder: torch.nn.Module) -> None:
        self.tokenizer, self.encoder = tokenizer, encoder.eval().requires_grad_(False)
        self.max_length, self.hidden_size = _max_length(tokenizer, encoder), encoder.config.hidden_size
        if tokenizer.pad_token is None:
            raise ValueError(
                "The tokenizer has no padding token, so captions of unequal length cannot be stacked. "
                "Set its pad_token and save the pipeline again."
            )
        words = encoder.get_input_embeddings().num_embeddings
        if len(tokenizer) > words:
            raise ValueError(
                f"The tokenizer knows {len(tokenizer)} tokens, but the text encoder embeds {words}: they do not "
                "belong together. Give the tokenizer that the encoder was trained with."
            )
        # The pipeline that is saved with this tokenizer pads its prompts to this, and has to pad as training did.
        tokenizer.model_max_length = self.max_length

    @torch.no_grad()
    def encode(self, captions: Sequence[str], device: torch.device | str) -> torch.Tensor:
        """`(B, L, D)` float32, equal to `encode_prompt(captions, ...)[0]` of the pipeline.

        Never under the caller's autocast, as the pipeline is not: an encoder computes in the precision of its weights.
        """
        device = torch.device(device)
        self.encoder.to(device)
        parts = [torch.empty(0, self.max_length, self.hidden_size, device=device)]
        with torch.autocast(device.type, enabled=False):
            for start in range(0, len(captions), CHUNK):
                parts.append(self._encode(list(captions[start : start + CHUNK]), device))
        return torch.cat(parts)

    def _encode(self, captions: list[str], device: torch.device) -> torch.Tensor:
        tokens = self.tokenizer(
            captions, padding="max_length", max_length=self.max_length, truncation=True, return_tensors="pt"
        )
        mask = tokens.attention_mask.to(device) if self._uses_mask else None
        return self.encoder(tokens.input_ids.to(device), attention_mask=mask)[0].float()

    @property
    def _uses_mask(self) -> bool:
        """Whether padding is hidden from the encoder; the pipeline hides it only where the configuration says so."""
        return bool(getattr(self.encoder.config, "use_attention_mask", False))

    def truncated(self, captions: Sequence[str]) -> list[bool]:
        """`[B]` whether each caption is longer than `max_length`, so that the encoder does not see its end."""
        cut: list[bool] = []
        # In parts, because tokenizers keep far more of a text than its tokens.
        for start in range(0, len(captions), _TOKENIZED):
            part = list(captions[start : start + _TOKENIZED])
            # Not verbose: transformers would warn about one of them, in words that do not fit what happens here.
            tokens = self.tokenizer(part, padding=False, truncation=False, verbose=False)["input_ids"]
            cut += [len(numbers) > self.max_length for numbers in tokens]
        return cut

    def count_truncated(self, captions: Sequence[str]) -> int:
        return sum(self.truncated(captions))

    def fingerprint(self) -> str:
        """Changes when the tokenizer, the encoder's configuration, its weights or their precision change."""
        config = self.encoder.config.to_diff_dict()
        config = {key: config[key] for key in config if key not in _NOT_COMPUTED and not key.startswith("_")}
        facts = [type(self.encoder).__name__, config, self.max_length, self._uses_mask, _identity(self.tokenizer)]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
        for name, tensor in sorted(self.encoder.state_dict().items()):
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            # numpy knows no bfloat16, but bytes are bytes.
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]


class Embedder:
    """`embedder(captions, device)` gives their embeddings `(B, L, D)` float32, encoded as they are asked for.

    Args:
        text: tokenizer and encoder.
        watch: warn about the first caption that is cut off; for captions that were not counted before.
    """

    def __init__(self, text: TextSpace, watch: bool = False) -> None:
        self.text, self._watch = text, watch

    def __call__(self, captions: Sequence[str], device: torch.device | str) -> torch.Tensor:
        # Captions repeat in a batch, the empty one above all, which stands for every caption that is dropped.
        unique = list(dict.fromkeys(captions))
        if self._watch:
            self._warn_once(unique)
        places = {caption: place for place, caption in enumerate(unique)}
        index = torch.tensor([places[caption] for caption in captions], dtype=torch.int64, device=device)
        return self.embed(unique, device).index_select(0, index)

    def embed(self, captions: Sequence[str], device: torch.device | str) -> torch.Tensor:
        """`(B, L, D)` of captions that do not repeat."""
        return self.text.encode(captions, device)

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """`(1, L, D)` of the empty caption, which pipelines guide away from."""
        return self([""], device)

    def _warn_once(self, captions: Sequence[str]) -> None:
        cut = [caption for caption, is_cut in zip(captions, self.text.truncated(captions), strict=True) if is_cut]
        if cut:
            self._watch = False
            logger.warning(
                "Captions of the stream are longer than the %d tokens that the text encoder takes; their ends are "
                "not seen. The first one: %r",
                self.text.max_length,
                cut[0],
            )


def _max_length(tokenizer: Any, encoder: torch.nn.Module) -> int:
    """Tokens that both take; a tokenizer that was never told its limit gives a number of thirty digits."""
    positions = getattr(encoder.config, "max_position_embeddings", None)
    length = min(tokenizer.model_max_length, positions or tokenizer.model_max_length)
    if length > 1 << 20:
        raise ValueError(
            "Neither the tokenizer (model_max_length) nor the text encoder (max_position_embeddings) says how many "
            "tokens a caption may have. Set model_max_length of the tokenizer and save the pipeline again."
        )
    return int(length)


def _identity(tokenizer: Any) -> list[Any]:
    """What decides the tokens of a text."""
    facts = [type(tokenizer).__name__, tokenizer.padding_side, tokenizer.pad_token_id]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [*facts, sorted(tokenizer.get_vocab().items())]
    # Truncation and padding are those of the last call, not the tokenizer's own.
    whole = json.loads(backend.to_str())
    return [*facts, {key: value for key, value in whole.items() if key not in ("truncation", "padding")}]
