"""One tuned model in every form: as it lies in memory, as PEFT's adapter on the stock base, merged, reloaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny_runs import byte_tokenizer, settings, tune, write_data, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from ajusta.base.errors import UserError
from ajusta.data.chat import chat_prompt_ids
from ajusta.engine.generate import Sampling, next_logits, stream
from ajusta.run import export, load
from ajusta.stages.answer import Speaker

TEXTS = ("The tarn number 1 lies north", "Where is key 3?", "q")
ASKED = [{"role": "user", "content": "Where is key 3?"}]


def our_logits(speaker: Speaker, ids: list[int]) -> torch.Tensor:
    """The logits behind the last of `ids`, by the road that answers."""
    chain = speaker.model.chain
    valid = torch.ones(1, len(ids), dtype=torch.bool)
    return next_logits(chain, torch.tensor([ids]), valid, DynamicCache(config=chain.model.config))[0]


def greedy(model: PreTrainedModel, ids: list[int]) -> list[int]:
    with torch.no_grad():
        made = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=3)
    return made[0, len(ids) :].tolist()


def our_greedy(speaker: Speaker, ids: list[int]) -> list[int]:
    columns = stream(speaker.model.chain, speaker.place, [ids], max_new_tokens=12, sampling=Sampling())
    made: list[int] = []
    for column in columns:
        made.append(column[0])
        if column[0] in speaker.end_token_ids:
            break
    return made


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom", "qwen3"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # PEFT's own
def test_every_form_says_the_same(kind: str, tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", kind)
    out = tmp_path / "run"
    tune(settings(base, write_data(tmp_path / "data"), out, steps=4, save_every=0, optimizer__learning_rate=2e-2))
    speaker = load(out)
    merged = export(out, form="merged")
    carried = export(out, tmp_path / "carried", form="adapter")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    untouched = [plain(torch.tensor([byte_tokenizer()(text)["input_ids"]])).logits[0, -1] for text in TEXTS]
    stock = {
        "merged": AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval(),
        "adapter": PeftModel.from_pretrained(plain, str(carried)).eval(),
    }
    prompt = chat_prompt_ids(speaker.tokenizer, ASKED)
    for name, model in stock.items():
        for text, before in zip(TEXTS, untouched, strict=True):
            ids = byte_tokenizer()(text)["input_ids"]
            with torch.no_grad():
                theirs = model(torch.tensor([ids])).logits[0, -1]
            ours = our_logits(speaker, ids)
            assert (ours - theirs).abs().max() <= 1e-4, name
            assert (ours - before).abs().max() > 1e-2, "the training must be seen"
        assert greedy(model, prompt) == our_greedy(speaker, prompt), name
    for folder in (merged, carried, out / "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.apply_chat_template(ASKED, add_generation_prompt=True)["input_ids"] == prompt
        assert json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    generation = json.loads((merged / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == list(speaker.end_token_ids)
    old, new = (json.loads((folder / "config.json").read_text(encoding="utf-8")) for folder in (base, merged))
    moved = {"transformers_version", "dtype", "_name_or_path", "architectures"}
    assert {key: value for key, value in new.items() if key not in moved} == {
        key: value for key, value in old.items() if key not in moved
    }


def test_an_export_never_writes_over_anything(finished: Path, tmp_path: Path) -> None:
    target = export(finished, tmp_path / "a", form="adapter")
    before = sorted(path.name for path in target.iterdir())
    with pytest.raises(UserError, match="exists already"):
        export(finished, target, form="adapter")
    with pytest.raises(UserError, match="did you mean 'merged'"):
        export(finished, tmp_path / "b", form="merge")
    (tmp_path / "c.partial").mkdir()
    (tmp_path / "c.partial" / "mine").write_text("x", encoding="utf-8")
    export(finished, tmp_path / "c", form="adapter")
    assert (tmp_path / "c.partial" / "mine").is_file()
    assert sorted(path.name for path in target.iterdir()) == before


def test_a_folder_that_is_no_finished_run(tmp_path: Path, model: Path) -> None:
    for folder in (tmp_path, tmp_path / "none", model):
        with pytest.raises(UserError, match="is no run folder"):
            load(folder)
    (tmp_path / "config.yaml").write_text(f"model: {model}\ndata: x\n", encoding="utf-8")
    with pytest.raises(UserError, match="has no adapter yet; finish it"):
        load(tmp_path)
