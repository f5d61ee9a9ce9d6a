from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ajusta.base.errors import ModelError
from ajusta.engine.weights import match_names, renamer

EXPECTED = ["transformer.wte.weight", "transformer.h.0.ln_1.weight", "lm_head.weight"]


def test_names_without_the_base_prefix_are_found():
    matching = match_names(["wte.weight", "h.0.ln_1.weight", "h.0.attn.bias"], EXPECTED, "transformer")
    assert matching.found == {
        "transformer.wte.weight": "wte.weight",
        "transformer.h.0.ln_1.weight": "h.0.ln_1.weight",
    }
    assert matching.missing == ("lm_head.weight",)
    assert matching.ignored == ("h.0.attn.bias",)
    assert matching.unexpected == ()
    matching.require_complete(tied=["lm_head.weight"])


def test_names_with_a_prefix_too_many_are_found():
    matching = match_names(["model.layers.0.q.weight"], ["layers.0.q.weight"], "model")
    assert matching.found == {"layers.0.q.weight": "model.layers.0.q.weight"}


def test_the_exact_name_wins_over_its_twin_whatever_the_order():
    stored = ["wte.weight", "transformer.wte.weight"]
    matching = match_names(stored, ["transformer.wte.weight"], "transformer")
    assert matching.found == {"transformer.wte.weight": "transformer.wte.weight"}
    assert matching.unexpected == ("wte.weight",)


def test_every_stored_name_is_in_one_of_the_lists():
    stored = ["wte.weight", "h.0.attn.masked_bias", "rotary_emb.inv_freq", "stranger"]
    matching = match_names(stored, EXPECTED, "transformer")
    assert sorted([*matching.found.values(), *matching.unexpected, *matching.ignored]) == sorted(stored)


def test_missing_and_unexpected_names_are_told_with_the_nearest():
    with pytest.raises(ModelError, match=r"M lacks lm_head.weight; did you mean 'lm_hed.weight'\?; expected every"):
        match_names(["lm_hed.weight"], ["lm_head.weight"], "model").require_complete(reference="M")
    with pytest.raises(ModelError, match=r"unexpected tensor names: experts.0.w1.weight"):
        match_names(["a", "experts.0.w1.weight"], ["a"], "model").require_complete()


def test_renamings_of_old_checkpoints_are_followed():
    with torch.device("meta"):
        config = AutoConfig.for_model(
            "gpt2", n_embd=8, n_layer=1, n_head=2, vocab_size=16, bos_token_id=0, eos_token_id=0
        )
        model = AutoModelForCausalLM.from_config(config)
    rename = renamer(model)
    assert rename("h.0.LayerNorm.gamma") == "h.0.LayerNorm.weight"
    matching = match_names(
        ["ln_f.gamma"], ["transformer.ln_f.weight"], "transformer", lambda name: name[:4] + ".weight"
    )
    assert matching.found == {"transformer.ln_f.weight": "ln_f.gamma"}
