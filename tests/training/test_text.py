"""Captions become exactly what StableDiffusionPipeline would prompt with, for CLIP and for other encoders."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from diffusers import StableDiffusionPipeline
from transformers import BertConfig, BertModel, BertTokenizer, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel

from diffusers_adaptive_ts.training.text import CHUNK, Embedder, TextSpace

from .tiny_stable_diffusion import MAX_LENGTH, tiny_pipeline

CPU = torch.device("cpu")
# Letters take a token each, so these have 4, 12, 13 and many tokens with the two that mark start and end.
CAPTIONS = ["red", "", "red abcdefgh", "abcde fghij", "abcde fghijk", "a blue square on a red one"]
HUGE = int(1e30)


@pytest.fixture(scope="module", autouse=True)
def accelerator() -> Accelerator:
    """accelerate's logger needs its state."""
    return Accelerator(cpu=True)


def bert_pipeline(use_attention_mask: bool | None = True, length: int = HUGE) -> StableDiffusionPipeline:
    """The tiny pipeline with a BERT encoder, whose tokenizer was not told its limit."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    words += [f"##{letter}" for letter in words[5:]]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = BertTokenizer(vocab=vocabulary, model_max_length=length)
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=10,
    )  # fmt: skip
    if use_attention_mask is not None:
        config.use_attention_mask = use_attention_mask
    pipeline = tiny_pipeline()
    # Dropout is on in a BERT that is built like this, until someone switches it off.
    pipeline.register_modules(text_encoder=BertModel(config).train(), tokenizer=tokenizer)
    return pipeline


def space_of(pipeline: StableDiffusionPipeline) -> TextSpace:
    return TextSpace(pipeline.tokenizer, pipeline.text_encoder)


PIPELINES = {
    "clip": tiny_pipeline,
    "bert": bert_pipeline,
    "bert that sees padding": lambda: bert_pipeline(False),
    "bert by default": lambda: bert_pipeline(None),
    "half": lambda: tiny_pipeline().to(dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", PIPELINES)
def test_embeddings_are_those_of_the_pipeline(kind):
    pipeline = PIPELINES[kind]()
    text = space_of(pipeline)
    with torch.no_grad():
        expected = pipeline.encode_prompt(CAPTIONS, CPU, 1, False)[0]
    embeddings = text.encode(CAPTIONS, CPU)
    assert torch.equal(embeddings, expected.float())
    assert embeddings.dtype == torch.float32
    assert embeddings.shape == (len(CAPTIONS), text.max_length, text.hidden_size)
    assert not embeddings.requires_grad
    # What it guides away from is the empty caption.
    with torch.no_grad():
        negative = pipeline.encode_prompt("red", CPU, 1, True)[1]
    torch.testing.assert_close(Embedder(text).empty(CPU), negative.float(), atol=1e-6, rtol=1e-5)


def test_padding_is_hidden_only_where_the_configuration_says_so():
    hidden, seen, default = (space_of(bert_pipeline(use)).encode(["red"], CPU) for use in (True, False, None))
    assert not torch.allclose(hidden, seen, atol=1e-3)
    assert torch.equal(seen, default)


def test_the_encoder_is_frozen_and_in_evaluation_mode():
    text = space_of(bert_pipeline())
    assert not text.encoder.training
    assert not any(parameter.requires_grad for parameter in text.encoder.parameters())
    assert torch.equal(text.encode(["red"], CPU), text.encode(["red"], CPU))


def test_the_callers_autocast_does_not_reach_the_encoder():
    text = space_of(tiny_pipeline())
    expected = text.encode(CAPTIONS, CPU)
    with torch.autocast("cpu", torch.bfloat16):
        # The test itself can fail only if autocast does change what the encoder computes.
        tokens = text.tokenizer(CAPTIONS, padding="max_length", max_length=12, truncation=True, return_tensors="pt")
        assert not torch.equal(text.encoder(tokens.input_ids)[0].float(), expected)
        assert torch.equal(text.encode(CAPTIONS, CPU), expected)


def test_many_captions_are_encoded_in_chunks():
    text, sizes = space_of(tiny_pipeline()), []
    text.encoder.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    captions = [f"{number}" for number in range(2 * CHUNK + 3)]
    whole = text.encode(captions, CPU)
    assert sizes == [CHUNK, CHUNK, 3]
    for row in (0, CHUNK, 2 * CHUNK + 2):
        torch.testing.assert_close(whole[row], text.encode([captions[row]], CPU)[0], atol=1e-6, rtol=1e-5)
    assert text.encode([], CPU).shape == (0, MAX_LENGTH, 16)


def test_the_length_is_what_tokenizer_and_encoder_both_take():
    assert space_of(tiny_pipeline()).max_length == MAX_LENGTH
    for given, expected in ((HUGE, 10), (512, 10), (7, 7)):
        pipeline = bert_pipeline(length=given)
        assert space_of(pipeline).max_length == expected
        # The pipeline that is saved must pad to the same length, or fail with positions it does not have.
        assert pipeline.tokenizer.model_max_length == expected


def test_the_length_outlives_saving(tmp_path):
    pipeline = bert_pipeline()
    space_of(pipeline)
    pipeline.tokenizer.save_pretrained(tmp_path)
    assert BertTokenizer.from_pretrained(tmp_path).model_max_length == 10


def test_captions_that_do_not_fit_are_counted(caplog):
    text = space_of(tiny_pipeline())
    lengths = [len(text.tokenizer(caption)["input_ids"]) for caption in CAPTIONS]
    assert MAX_LENGTH in lengths
    assert MAX_LENGTH + 1 in lengths
    caplog.clear()
    assert text.truncated(CAPTIONS) == [length > MAX_LENGTH for length in lengths]
    assert text.count_truncated(CAPTIONS * 500) == 500 * sum(length > MAX_LENGTH for length in lengths)
    assert text.count_truncated([]) == 0
    assert caplog.records == []


def test_parts_that_do_not_belong_together_are_refused():
    clip, bert = tiny_pipeline(), bert_pipeline()
    with pytest.raises(ValueError, match=r"knows 195 tokens, but the text encoder embeds 57.*do not belong together"):
        TextSpace(clip.tokenizer, bert.text_encoder)
    bert.tokenizer.pad_token = None
    with pytest.raises(ValueError, match=r"no padding token.*Set its pad_token"):
        space_of(bert)


def test_an_encoder_of_any_length_needs_a_tokenizer_that_has_one():
    encoder = T5EncoderModel(T5Config(vocab_size=57, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="Set model_max_length of the tokenizer"):
        TextSpace(bert_pipeline().tokenizer, encoder)
    assert TextSpace(bert_pipeline(length=9).tokenizer, encoder).encode(["red"], CPU).shape == (1, 9, 16)


def test_the_fingerprint_is_that_of_what_is_computed(tmp_path):
    pipeline = tiny_pipeline()
    first = space_of(pipeline).fingerprint()
    pipeline.save_pretrained(tmp_path)
    text = TextSpace(
        CLIPTokenizer.from_pretrained(tmp_path / "tokenizer"), CLIPTextModel.from_pretrained(tmp_path / "text_encoder")
    )
    assert text.fingerprint() == first
    # Tokenizers remember how they were called last.
    text.encode(CAPTIONS, CPU)
    assert text.fingerprint() == first
    text.count_truncated(CAPTIONS)
    assert text.fingerprint() == first


def _weights(pipeline: Any) -> None:
    with torch.no_grad():
        next(pipeline.text_encoder.parameters())[0, 0] += 1e-3


def _tokens(pipeline: Any) -> None:
    # As many tokens as before, but "red" is no longer one of them.
    whole = pipeline.tokenizer.get_vocab()
    whole["re"], whole["red</w>"] = whole["red</w>"], whole["re"]
    merges = [("r", "e"), ("re", "d</w>"), ("b", "l"), ("bl", "u"), ("blu", "e</w>")]
    pipeline.tokenizer = CLIPTokenizer(vocab=whole, merges=merges, model_max_length=MAX_LENGTH)


CHANGES = {
    "weights": _weights,
    "precision": lambda pipeline: pipeline.text_encoder.to(torch.bfloat16),
    "configuration": lambda pipeline: setattr(pipeline.text_encoder.config, "hidden_act", "gelu"),
    "attention mask": lambda pipeline: setattr(pipeline.text_encoder.config, "use_attention_mask", True),
    "length": lambda pipeline: setattr(pipeline.tokenizer, "model_max_length", 9),
    "padding": lambda pipeline: setattr(pipeline.tokenizer, "padding_side", "left"),
    "tokens": _tokens,
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_fingerprint_changes_with(change):
    pipeline = tiny_pipeline()
    other = copy.deepcopy(pipeline)
    CHANGES[change](other)
    assert space_of(pipeline).fingerprint() != space_of(other).fingerprint()


def test_a_live_embedder_encodes_each_caption_of_a_batch_once():
    text, sizes = space_of(tiny_pipeline()), []
    text.encoder.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    batch = ["red", "", "blue", "", "red", ""]
    embeddings = Embedder(text)(batch, CPU)
    assert sizes == [3]
    torch.testing.assert_close(embeddings, text.encode(batch, CPU), atol=1e-6, rtol=1e-5)
    assert torch.equal(embeddings[1], embeddings[5])
    assert Embedder(text)([], CPU).shape == (0, MAX_LENGTH, 16)


def test_a_stream_warns_once_about_captions_that_do_not_fit(caplog):
    text = space_of(tiny_pipeline())
    embedder = Embedder(text, watch=True)
    with caplog.at_level(logging.WARNING):
        embedder(["red", ""], CPU)
        assert caplog.records == []
        for _ in range(2):
            embedder(["red", "a caption of the stream"], CPU)
        Embedder(text)(["a caption of the stream"], CPU)
    (record,) = caplog.records
    assert "longer than the 12 tokens" in record.getMessage()
    assert "'a caption of the stream'" in record.getMessage()
