"""One tuned model in every form: as it lies in memory, as PEFT's adapter on the stock base, merged, reloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_models import tiny_config
from tiny_runs import CHATML, SPECIAL, adapter_tensors, byte_tokenizer, settings, tune, write_data, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, DynamicCache, PreTrainedModel

from ajusta.base.errors import UserError
from ajusta.data.chat import chat_prompt_ids
from ajusta.engine.generate import Sampling, next_logits, stream
from ajusta.run import export, load
from ajusta.spec.config import load_config
from ajusta.stages.answer import Speaker

TEXTS = ("The tarn number 1 lies north", "Where is key 3?", "q")
IDS = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "model_type", "transformers_version")
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


def write_gguf(file: Path, base: Path) -> Path:
    """Write a Llama as llama.cpp's converter does, with its tokenizer and template."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), byte_tokenizer()
    config, writer = model.config, gguf.GGUFWriter(file, "llama")
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    tokens[1] = "\u0120\u0120"  # in the place of a token that nothing uses: the format has no empty list of merges
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(["\u0120 \u0120"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(3)
    writer.add_chat_template(CHATML)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:
            weight = weight.view(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(table.get_name(name, (".weight",)), np.ascontiguousarray(weight.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_gguf_file_is_tuned_like_the_folder_it_was_made_of(
    model: Path, data: Path, finished: Path, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "m.gguf", model)
    tune(settings(file, data, tmp_path / "run"))
    of_file, of_folder = adapter_tensors(tmp_path / "run"), adapter_tensors(finished)
    assert of_file.keys() == of_folder.keys()
    assert all(torch.equal(of_file[name], of_folder[name]) for name in of_file)
    assert "".join(load(tmp_path / "run").answer(ASKED, max_tokens=12)) == "".join(
        load(finished).answer(ASKED, max_tokens=12)
    )
    merged = export(tmp_path / "run", form="merged")
    assert AutoModelForCausalLM.from_pretrained(merged).dtype == torch.bfloat16


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


@pytest.mark.parametrize("wide", [False, True], ids=["fp32", "bf16 beside fp32 buffers"])
def test_buffers_that_the_base_was_saved_with_are_written_back(wide: bool, data: Path, tmp_path: Path) -> None:
    config = tiny_config("deepseek_v3").to_diff_dict()
    base = write_model(tmp_path / "base", "deepseek_v3", **{k: v for k, v in config.items() if k not in IDS})
    file = base / "model.safetensors"
    stored = load_file(file)
    biases = {name for name in stored if name.endswith("e_score_correction_bias")}
    generator = torch.Generator().manual_seed(1)
    for name, tensor in stored.items():
        is_bias = name in biases
        stored[name] = (
            torch.rand(tensor.shape, generator=generator) if is_bias else tensor.bfloat16() if wide else tensor
        )
    save_file(stored, file, metadata={"format": "pt"})
    out = tmp_path / "run"
    tune(settings(base, data, out, steps=2, save_every=0, text__packing=False))
    merged = export(out, form="merged")
    written = load_file(merged / "model.safetensors")
    assert biases and all(torch.equal(written[name], stored[name]) for name in biases)
    assert all(written[name].dtype == torch.float32 for name in biases)
    assert written["model.norm.weight"].dtype == (torch.bfloat16 if wide else torch.float32)
    stock = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
    ids = byte_tokenizer()(TEXTS[0])["input_ids"]
    with torch.no_grad():
        theirs = stock(torch.tensor([ids])).logits[0, -1]
    ours = our_logits(load(out), ids)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < (2e-2 if wide else 1e-4)  # merged in bf16


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of accelerate and bitsandbytes
def test_a_base_that_is_already_quantized_is_tuned_as_it_is(
    data: Path, tmp_path: Path, typed: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bitsandbytes")
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    plain, base, out = write_model(tmp_path / "plain"), tmp_path / "base", tmp_path / "run"
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=how, dtype=torch.float32).save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    assert typed("plan", "-m", str(base), "--bits", "int8", "--set", "device=cpu") == 2
    assert "is already quantized to nf4, and bits is int8" in capsys.readouterr().err
    record, _ = tune(settings(base, data, out, steps=4, save_every=0, optimizer__learning_rate=2e-2))
    assert record.plan.bits == "nf4" and load_config(out / "config.yaml").bits == "nf4"
    merged = export(out, form="merged")
    assert "quantization_config" not in json.loads((merged / "config.json").read_text(encoding="utf-8"))
    stock = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
    speaker = load(out)
    for text in TEXTS:
        ids = byte_tokenizer()(text)["input_ids"]
        with torch.no_grad():
            theirs = stock(torch.tensor([ids])).logits[0, -1]
        assert float((our_logits(speaker, ids) - theirs).abs().max()) <= 1e-4
