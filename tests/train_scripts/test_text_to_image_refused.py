"""What the text-to-image script refuses: one line that says what to do, and nothing is written."""

import importlib.util
import json
import shutil

import pytest
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from safetensors.torch import load_file, save_file

from tests.training.test_text import bert_pipeline
from tests.training.tiny_stable_diffusion import tiny_unet_config, write_captioned

from .conftest import TINY_UNET, TextToImage


@pytest.fixture(scope="module")
def wrong(tmp_path_factory, given_parts) -> TextToImage:
    """The script beside folders that it has to refuse."""
    script = TextToImage(tmp_path_factory.mktemp("wrong"), given_parts)
    folder = script.folder
    for name, value in {"numbers": 3, "empty": " ", "missing": None}.items():
        write_captioned(folder / name, count=4)
        rows = [json.loads(line) for line in (folder / name / "metadata.jsonl").read_text().splitlines()]
        for number, row in enumerate(rows):
            row["text"] = value if name == "numbers" or number == 2 else row["text"]
        (folder / name / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write_captioned(folder / "bare", count=4)
    (folder / "bare" / "metadata.jsonl").unlink()
    DDPMPipeline(UNet2DModel.from_config(TINY_UNET), DDPMScheduler()).save_pretrained(folder / "ddpm")
    for name, changes in {"wide": {"cross_attention_dim": 24}, "inpainting": {"in_channels": 9}, "good": {}}.items():
        config = tiny_unet_config(_class_name="UNet2DConditionModel", **changes)
        (folder / f"{name}.json").write_text(json.dumps(config))
    shutil.copytree(given_parts / "pipeline", folder / "inpainting")
    change_unet(folder / "inpainting")
    bert_pipeline().text_encoder.save_pretrained(folder / "no tokenizer")
    return script


def change_unet(pipeline) -> None:
    """Nine channels instead of four, as Stable Diffusion for inpainting has."""
    weights = load_file(pipeline / "unet" / "diffusion_pytorch_model.safetensors")
    weights["conv_in.weight"] = weights["conv_in.weight"][:, [0, 1, 2, 3, 0, 1, 2, 3, 0]].contiguous()
    save_file(weights, pipeline / "unet" / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    config = json.loads((pipeline / "unet" / "config.json").read_text())
    (pipeline / "unet" / "config.json").write_text(json.dumps(config | {"in_channels": 9}))


NOTHING = {"pretrained_model_name_or_path": None}
NEW = {**NOTHING, "model_config_name_or_path": "FOLDER/good.json", "autoencoder": "GIVEN/vae", "text_encoder": "GIVEN"}
REFUSED = {
    "nothing named": ({**NOTHING, "train_data_dir": None}, "Give --pretrained_model_name_or_path"),
    "revision of nothing": ({**NEW, "revision": "main"}, "--revision is about the weights of a pipeline"),
    "cached stream": ({"streaming": True, "cache_latents": True}, "--cache_latents cannot be had with --streaming"),
    "no data": ({"train_data_dir": None}, "give --dataset_name or --train_data_dir"),
    "no captions": ({"train_data_dir": "FOLDER/bare"}, "The columns are: image. None of them holds text"),
    "caption column": ({"caption_column": "txt"}, "Did you mean 'text'? The columns are: image, text."),
    "captions of numbers": ({"train_data_dir": "FOLDER/numbers"}, "it must hold strings, or lists of strings"),
    "empty caption": ({"train_data_dir": "FOLDER/empty"}, "row 2 of split 'train' has an empty caption (' ')"),
    "missing caption": ({"train_data_dir": "FOLDER/missing"}, "row 2 of split 'train' has no caption"),
    "other pipeline": ({"pretrained_model_name_or_path": "FOLDER/ddpm"}, "is a DDPMPipeline; this script trains a"),
    "no pipeline": ({"pretrained_model_name_or_path": "FOLDER/bare"}, "no readable model_index.json"),
    "no such pipeline": ({"pretrained_model_name_or_path": "FOLDER/nowhere"}, "is no folder here"),
    "no such variant": ({"variant": "fp17"}, "fp17"),
    "nine channels": ({"pretrained_model_name_or_path": "FOLDER/inpainting"}, "The unet's in_channels is 9"),
    "gamma and weighting": ({"snr_gamma": 5, "loss_weighting": "p2"}, "--loss_weighting p2 contradicts it"),
    "gamma and options": ({"snr_gamma": 5, "weighting_options": ["gamma=3"]}, "--snr_gamma is an option of its own"),
    "gamma and the same": ({"snr_gamma": 5, "loss_weighting": "min_snr"}, "Give one of them"),
    "alpha without rank": ({"lora_alpha": 4}, "go with --lora_rank"),
    "targets without rank": ({"lora_targets": ["to_q"]}, "go with --lora_rank"),
    "targets": ({"lora_rank": 2, "lora_targets": ["to_qq"]}, "Did you mean 'to_q'? Layers that can be adapted: conv"),
    "average of lora": ({"lora_rank": 2, "use_ema": True}, "Leave --use_ema out"),
    "lora from scratch": ({**NEW, "lora_rank": 2}, "--lora_rank adapts a trained network"),
    "steps of a pipeline": ({"ddpm_num_steps": 20}, "a noise process of its own. Leave it out"),
    "betas of a pipeline": ({"ddpm_beta_schedule": "linear"}, "a noise process of its own"),
    "unknown betas": ({**NEW, "ddpm_beta_schedule": "linnear"}, "--ddpm_beta_schedule"),
    "eps without signal": ({"rescale_betas_zero_snr": True}, "Use --prediction_type v_prediction or sample"),
    "parts of a pipeline": ({"autoencoder": "GIVEN"}, "a trained one knows only those of its own pipeline"),
    "no encoder": ({**NEW, "text_encoder": None}, "missing: --text_encoder"),
    "no tokenizer": ({**NEW, "text_encoder": "FOLDER/no tokenizer"}, "no vocabulary of a tokenizer"),
    "width of the text": ({**NEW, "model_config_name_or_path": "FOLDER/wide.json"}, "Set cross_attention_dim to 16"),
    "channels": ({**NEW, "model_config_name_or_path": "FOLDER/inpainting.json"}, "in_channels is 9"),
    "resolution": ({"resolution": 17}, "multiples of 2; 17 is not"),
    "dream": ({"dream_detail_preservation": 2}, "changes nothing without --dream_training"),
    "offset": ({"noise_offset": -1}, "--noise_offset is a scale of noise"),
    "dropout": ({"caption_dropout": 1}, "--caption_dropout must be at least 0 and below 1"),
    "offload": ({"offload_ema": True}, "--offload_ema is about averaged weights; give --use_ema"),
    "foreach": ({"foreach_ema": True}, "--foreach_ema is about averaged weights; give --use_ema"),
    "cache of a stream": ({"streaming": True, "cache_text_embeddings": True}, "Leave one of the two out"),
    "endless stream": ({"streaming": True, "max_train_steps": None}, "--streaming needs --max_train_steps"),
    "xformers": ({"enable_xformers_memory_efficient_attention": True}, "needs xformers"),
    "tracker": ({"report_to": "trackio"}, "--report_to trackio is not installed"),
    "8 bits": ({"use_8bit_adam": True}, "--use_8bit_adam needs bitsandbytes: pip install bitsandbytes"),
}  # fmt: skip
PACKAGES = {"8 bits": "bitsandbytes", "xformers": "xformers", "tracker": "trackio"}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_one_line_and_nothing_is_written(case, wrong):
    """In this process, for speed; the next test shows what a user sees."""
    if case in PACKAGES and importlib.util.find_spec(PACKAGES[case]) is not None:
        pytest.skip(f"{PACKAGES[case]} is installed")
    options, said = REFUSED[case]
    options = {
        name: value.replace("FOLDER", str(wrong.folder)).replace("GIVEN", str(wrong.pipeline))
        if isinstance(value, str)
        else value
        for name, value in options.items()
    }
    message = wrong.here(wrong.words(f"run of {case}", **options))
    assert isinstance(message, str)
    assert message.startswith("error: ")
    assert "\n" not in message
    assert said in message
    assert not (wrong.folder / f"run of {case}").exists()


def test_a_user_sees_one_clear_line(text_to_image):
    done = text_to_image.run(text_to_image.words("run", snr_gamma=5, loss_weighting="p2"), check=False)
    assert done.returncode == 1
    said = "error: --snr_gamma 5.0 is --loss_weighting min_snr with that gamma"
    assert done.stderr.splitlines()[-1].startswith(said)
    assert "Traceback" not in done.stderr
    assert not (text_to_image.folder / "run").exists()


def test_an_older_run_outlives_a_mistake_in_one_that_should_replace_it(text_to_image):
    folder = text_to_image.folder / "run"
    assert text_to_image.here(text_to_image.words("run")) == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for options in ({"dream_detail_preservation": 2}, {"lora_targets": ["to_q"]}, {"noise_offset": -1}, {}):
        words = text_to_image.words("run", overwrite_output_dir=bool(options), **options)
        assert str(text_to_image.here(words)).startswith("error: ")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
