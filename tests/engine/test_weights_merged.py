"""A checkpoint with single experts is the one with stacked experts: every name, every bit, and no byte beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architectures import stock_model
from planned import Real, subject
from safetensors.torch import load_file, save_file
from tiny_models import tiny_config
from torch import Tensor
from transformers import PreTrainedModel

from ajusta.base.errors import ModelError
from ajusta.engine.assemble import assemble
from ajusta.engine.skeleton import build_skeleton
from ajusta.engine.weights import MergedSource, SafetensorsSource, open_weights
from ajusta.memory.ledger import Ledger
from ajusta.memory.place import RealPlace
from ajusta.planning.trace import Traced

EXPERTS = "model.layers.1.mlp.experts"


def model(kind: str = "qwen3_moe", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return stock_model(tiny_config(kind), dtype)


def singled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take stacked experts apart by hand, as Qwen3's checkpoints on the hub hold them."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for number, both in enumerate(tensor):
                gate, up = both.chunk(2)
                found[f"{path}.{number}.gate_proj.weight"] = gate.contiguous()
                found[f"{path}.{number}.up_proj.weight"] = up.contiguous()
        elif leaf == "down_proj":
            found |= {f"{path}.{number}.down_proj.weight": down.contiguous() for number, down in enumerate(tensor)}
        else:
            found[name] = tensor.contiguous()
    return found


def write(folder: Path, stock: PreTrainedModel, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    stock.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def open_single(folder: Path, stock: PreTrainedModel) -> MergedSource:
    source = open_weights(write(folder, stock, singled(stock.state_dict())))
    assert isinstance(source, MergedSource)
    return source


def test_single_experts_are_the_stacked_ones(tmp_path: Path) -> None:
    stock = model()
    stacked = open_weights(write(tmp_path / "stacked", stock, dict(stock.state_dict())))
    assert isinstance(stacked, SafetensorsSource)
    source = open_single(tmp_path / "single", stock)
    assert source.infos == stacked.infos  # the same names, shapes, dtypes and bytes: none is lost, none left over
    for name, tensor in stock.state_dict().items():
        assert torch.equal(source.read(name), tensor), name
    assert source.fingerprint == SafetensorsSource(tmp_path / "single").fingerprint != stacked.fingerprint


def test_a_model_assembled_of_them_has_the_same_logits(tmp_path: Path) -> None:
    stock = model()
    ids = torch.arange(3, 20)[None]
    logits = []
    for source in (open_single(tmp_path / "single", stock), open_weights(tmp_path / "single")):
        skeleton = build_skeleton(source.config, torch.float32)
        made = assemble(skeleton, source, RealPlace("cpu"), dtype=torch.float32, bits="none", adapter=None)
        with torch.no_grad():
            logits.append(made.chain.model(input_ids=ids, use_cache=False).logits)
    with torch.no_grad():
        expected = stock(input_ids=ids, use_cache=False).logits
    assert torch.equal(logits[0], logits[1])
    assert float((logits[0] - expected).abs().max()) < 1e-5 * float(expected.abs().max())  # other kernels


@pytest.mark.parametrize("kind", ["mixtral", "olmoe", "deepseek_v2", "phimoe", "jamba", "olmo_hybrid"])
def test_what_transformers_takes_apart_when_it_saves_is_put_together(kind: str, tmp_path: Path) -> None:
    stock = model(kind)
    stock.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) != set(stock.state_dict())
    source = open_weights(tmp_path)
    skeleton = build_skeleton(source.config, torch.float32)
    made = assemble(skeleton, source, RealPlace("cpu"), dtype=torch.float32, bits="none", adapter=None)
    expected = dict(stock.named_parameters())
    assert expected.keys() == skeleton.slots.keys() - {name for name, _ in skeleton.tied}
    for name, tensor in expected.items():
        path, _, leaf = name.rpartition(".")
        module = made.chain.submodule(path)
        found = made.linears[path].storage.state()["weight"] if path in made.linears and leaf == "weight" else None
        assert torch.equal(found if found is not None else module.get_parameter(leaf), tensor), name


def test_reading_holds_nothing_beside_the_whole(tmp_path: Path) -> None:
    source = open_single(tmp_path / "single", model())
    with Ledger() as ledger:
        whole = source.read(f"{EXPERTS}.gate_up_proj")
    assert ledger.peak.live_bytes == whole.nbytes == source.infos[f"{EXPERTS}.gate_up_proj"].stored_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_load_is_traced_to_the_byte(dtype: torch.dtype, tmp_path: Path) -> None:
    what = subject(open_single(tmp_path / "single", model()), dtype=dtype)
    traced, real = Traced(what), Real(what)
    assert 0 <= real.load.live_bytes - traced.load.peak_bytes <= 128  # the rotary frequencies' temporaries


def test_rows_can_be_read_alone(tmp_path: Path) -> None:
    stock = model()
    source = open_single(tmp_path / "single", stock)
    for leaf in ("gate_up_proj", "down_proj"):
        whole = stock.state_dict()[f"{EXPERTS}.{leaf}"]
        assert torch.equal(source.read_rows(f"{EXPERTS}.{leaf}", 1, 3), whole[1:3])
        with pytest.raises(IndexError):
            source.read_rows(f"{EXPERTS}.{leaf}", 2, 9)
    assert torch.equal(source.read_rows("lm_head.weight", 3, 5), stock.state_dict()["lm_head.weight"][3:5])


def test_rows_of_parts_that_lie_behind_each_other_can_be_read_alone(tmp_path: Path) -> None:
    stock = model("olmo_hybrid")
    stock.save_pretrained(tmp_path)
    source = open_weights(tmp_path)
    joined = set(source.infos) - set(SafetensorsSource(tmp_path).infos)
    name = next(name for name in joined if "conv" in name)
    whole = stock.state_dict()[name]
    middle = whole.shape[0] // 3
    assert torch.equal(source.read_rows(name, middle - 2, middle + 5), whole[middle - 2 : middle + 5])


def spoiled(folder: Path, stock: PreTrainedModel, change: dict[str, Tensor | None]) -> Path:
    tensors = singled(stock.state_dict()) | {name: tensor for name, tensor in change.items() if tensor is not None}
    return write(folder, stock, {name: t for name, t in tensors.items() if change.get(name, t) is not None})


def test_parts_that_are_missing_are_named(tmp_path: Path) -> None:
    gone = {f"{EXPERTS}.2.up_proj.weight": None, f"{EXPERTS}.3.gate_proj.weight": None}
    said = rf"lacks mlp.experts.2.up_proj.weight, mlp.experts.3.gate_proj.weight for {EXPERTS}.gate_up_proj; expected"
    with pytest.raises(ModelError, match=said):
        open_weights(spoiled(tmp_path / "spoiled", model(), gone))


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(5, 64), r"do not make up .*gate_up_proj \[4, 64, 64\]"),
        (torch.zeros(32, 64).half(), "float16, float32"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tensor: Tensor, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        open_weights(spoiled(tmp_path / "spoiled", model(), {f"{EXPERTS}.1.up_proj.weight": tensor}))


def test_an_expert_too_many_is_refused_by_name(tmp_path: Path) -> None:
    source = open_weights(spoiled(tmp_path / "spoiled", model(), {f"{EXPERTS}.4.up_proj.weight": torch.zeros(32, 64)}))
    skeleton = build_skeleton(source.config, torch.float32)
    with pytest.raises(ModelError, match=r"unexpected tensor names: .*experts.4.up_proj.weight"):
        assemble(skeleton, source, RealPlace("cpu"), dtype=torch.float32, bits="none", adapter=None)
