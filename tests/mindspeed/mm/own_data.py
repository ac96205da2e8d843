"""Pictures, conversations, a tokenizer and a processor, as users of MindSpeed-MM have them; small ones, made here.

The conversations are in LLaVA's format, and go through MindSpeed-MM's own converter. Ids of the tokens are those of
:mod:`tests.mindspeed.mm.samples`, so the model's vocabulary is as small. Lengths differ: every picture has one of five
sizes, half of the conversations have none, and answers have 3 to 18 words.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.mindspeed.mm import samples

PATCH, MERGE = 7, samples.MERGE  # pixels of a side of a patch; patches of a side of what becomes one token
SIZES = ((28, 28), (42, 28), (28, 56), (42, 42), (56, 42))  # MindSpeed-MM enlarges what is smaller than 28
SEQUENCE = 64  # longer samples are cut, before a white picture is added to a batch without any
NUM_SAMPLES = 40
SPECIAL = (
    *("<|endoftext|>", "<|vision_start|>", "<|image_pad|>", "<|video_pad|>"),
    *("<|vision_end|>", "<|im_start|>", "<|im_end|>"),
)
WORDS = (
    *("system", "user", "assistant", "You", "are", "a", "helpful", ".", "?", "What", "is", "here"),
    *(
        f"{colour}{thing}"
        for colour in ("red", "green", "blue", "grey")
        for thing in ("dots", "waves", "bars", "rings")
    ),
)
_READS = {
    **{"use_fast_tokenizer": True, "split_special_tokens": False, "image_max_pixels": 262144, "image_min_pixels": 0},
    **{"video_max_pixels": 16384, "video_min_pixels": 0, "video_fps": 2.0, "video_maxlen": 64},
}
_COLUMNS = {
    **{"system": None, "images": "images", "videos": None, "messages": "messages"},
    **{"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    **{"observation_tag": None, "function_tag": None, "system_tag": None},
}


@functools.cache
def write() -> dict[str, Any]:
    """Write all, once for this process, and return what ``--mm-data`` says of it."""
    folder = Path(tempfile.mkdtemp(prefix="vtp-mm-data-"))
    _write_processor(folder / "processor")
    _write_pictures(folder / "train2017")
    (folder / "llava.json").write_text(json.dumps([_conversation(number) for number in range(NUM_SAMPLES)]))
    _convert(folder)
    basic: dict[str, Any] = {
        "template": "qwen2vl",
        "dataset_dir": str(folder),
        "dataset": str(folder / "converted.json"),
        "cache_dir": str(folder / "cache"),
        "train_on_prompt": False,
        "mask_history": False,
        "preprocessing_batch_size": 1000,
        "preprocessing_num_workers": None,
        "max_samples": None,
        "tool_format": None,
    }
    return {
        "dataset_param": {
            "dataset_type": "huggingface",
            "preprocess_parameters": {"model_name_or_path": str(folder / "processor"), **_READS},
            "basic_parameters": basic,
            "attr": _COLUMNS,
        },
        "dataloader_param": {
            "dataloader_mode": "sampler",
            "drop_last": True,
            "sampler_type": "BaseRandomBatchSampler",
            "collate_param": {"model_name": "qwen2vl", "ignore_pad_token_for_loss": True},
            "shuffle": True,
        },
    }


def _write_processor(folder: Path) -> None:
    """Write a tokenizer of whole words, and a processor with patches of 7 x 7 pixels."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    assert len(vocabulary) <= samples.VOCABULARY and vocabulary["<|image_pad|>"] == samples.PICTURE
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens([*SPECIAL])
    patches = {
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "min_pixels": 1,
        "max_pixels": 1 << 20,
    }
    transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(**patches),
        tokenizer=transformers.Qwen2TokenizerFast(tokenizer_object=words),
        video_processor=transformers.Qwen2VLVideoProcessor(**patches),
    ).save_pretrained(folder)


def _write_pictures(folder: Path) -> None:
    import numpy
    from PIL import Image

    folder.mkdir()
    for number in range(NUM_SAMPLES):
        width, height = SIZES[number % len(SIZES)]
        pixels = numpy.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=90)


def _conversation(number: int) -> dict[str, Any]:
    """One conversation; half have no picture, so microbatches without any occur: MindSpeed-MM adds a white one."""
    things = WORDS[12:]
    first = things[number % len(things)]
    said = " ".join(things[(number + 3 * place) % len(things)] for place in range(1 + number * 5 % 16))
    has_picture = number % 8 < 4
    question = f"{'<image>' if has_picture else ''} What is {first} here ?"
    return {
        "id": str(number),
        **({"image": f"{number}.jpg"} if has_picture else {}),
        "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": f"{first} {said} ."}],
    }


def _convert(folder: Path) -> None:
    """Run MindSpeed-MM's converter."""
    script = (
        Path(os.environ["VTP_MINDSPEED_MM"]) / "mindspeed_mm/fsdp/tools/data_tool/llava_instruct_2_mllm_demo_format.py"
    )
    paths = {
        "coco_path": folder,
        "llava_json_path": folder / "llava.json",
        "output_json_path": folder / "converted.json",
    }
    words = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
