"""FLOPs and bytes of single operations, exactly; their time by given speeds; what the ledger makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ajusta.blocks import bitsandbytes_kernels, int8, nf4_codes
from ajusta.blocks.grouped import grouped_product
from ajusta.blocks.int8 import Int8
from ajusta.blocks.nf4 import Nf4
from ajusta.blocks.storage import Storage
from ajusta.memory.abridge import in_full, turns
from ajusta.memory.ledger import Category, Ledger, declare_work, repeated
from ajusta.memory.roofline import NOTHING, Clock, Work, kernel_name, work_of
from ajusta.spec.roofline import Kernel, Roofline

DEVICES = ["cpu", "meta"]
ATEN = torch.ops.aten
BYTES = Roofline(
    matmul_flops={"fp32": 1e30},
    bandwidth_bytes_per_s=1.0,
    per_operation_s=0.0,
    source="a byte a second",
    measured=False,
)
CALLS = Roofline(
    matmul_flops={"fp32": 1e30},
    bandwidth_bytes_per_s=1e30,
    per_operation_s=1.0,
    source="a call a second",
    measured=False,
)


class Noting(TorchDispatchMode):
    """Writes down the work of each operation that does any."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        work = work_of(func, args, kwargs or {}, result)
        if work != NOTHING:
            self.works.append(work)
        return result


def noted(run: Callable[[], object]) -> list[Work]:
    with Noting() as noting:
        run()
    return noting.works


def one(run: Callable[[], object]) -> Work:
    (work,) = noted(run)
    return work


def fp32(device: str, *shape: int) -> Tensor:
    return torch.zeros(shape, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("run", "flops", "elements", "rows", "side"),
    [
        (lambda z: z(4, 8) @ z(8, 16), 2 * 4 * 8 * 16, 4 * 8 + 8 * 16 + 4 * 16, 4, 8),
        (lambda z: z(4, 8) @ z(16, 8).t(), 2 * 4 * 8 * 16, 4 * 8 + 8 * 16 + 4 * 16, 4, 8),
        (lambda z: torch.addmm(z(4), z(32, 8), z(8, 4)), 2 * 32 * 8 * 4, 4 + 32 * 8 + 8 * 4 + 32 * 4, 32, 4),
        (lambda z: z(32, 16).addmm_(z(32, 2), z(2, 16)), 2 * 32 * 2 * 16, 2 * 32 * 16 + 32 * 2 + 2 * 16, 32, 2),
        (lambda z: torch.bmm(z(3, 4, 8), z(3, 8, 16)), 3 * 2 * 4 * 8 * 16, 3 * (4 * 8 + 8 * 16 + 4 * 16), 4, 8),
        (lambda z: torch.baddbmm(z(3, 4, 16), z(3, 4, 8), z(3, 8, 16)), 3 * 1024, 3 * (2 * 64 + 4 * 8 + 8 * 16), 4, 8),
        (lambda z: torch.mv(z(4, 8), z(8)), 2 * 4 * 8, 4 * 8 + 8 + 4, 1, 4),
        (lambda z: torch.mm(z(4, 8), z(8, 16), out=z(4, 16)), 2 * 4 * 8 * 16, 4 * 8 + 8 * 16 + 4 * 16, 4, 8),
    ],
)
def test_products(device: str, run: Callable[[Any], object], flops: int, elements: int, rows: int, side: int) -> None:
    work = noted(lambda: run(lambda *shape: torch.empty(shape, device=device)))[-1]
    assert work == Work(flops=flops, bytes=4 * elements, rows=rows, side=side)


def test_a_product_for_each_expert_has_an_experts_share_of_the_rows() -> None:
    rows, weight = torch.zeros(10, 8), torch.zeros(4, 8, 16)
    ends = torch.tensor([3, 6, 8, 10], dtype=torch.int32)
    work = noted(lambda: grouped_product(rows.to("meta"), weight.to("meta"), ends.to("meta")))[-1]
    moved = 4 * (10 * 8 + 4 * 8 * 16 + 10 * 16) + 16
    assert work == Work(flops=2 * 10 * 8 * 16, bytes=moved, rows=3, side=8)


def test_a_product_grouped_along_its_sum_shares_the_sum_out() -> None:
    left, right = (torch.zeros(shape, dtype=torch.bfloat16, device="meta") for shape in ((16, 64), (64, 32)))
    ends = torch.zeros(4, dtype=torch.int32, device="meta")
    result = torch.zeros(4, 16, 32, dtype=torch.bfloat16, device="meta")
    work = work_of(ATEN._grouped_mm.default, (left, right, ends), {}, result)
    assert work.flops == 2 * 16 * 64 * 32 and work.dtype == "bf16"


@pytest.mark.parametrize("device", DEVICES)
def test_attention_on_a_processor(device: str) -> None:
    query, key, value = fp32(device, 1, 4, 64, 16), fp32(device, 1, 2, 64, 16), fp32(device, 1, 2, 64, 16)
    forward, backward = (
        ATEN._scaled_dot_product_flash_attention_for_cpu, ATEN._scaled_dot_product_flash_attention_for_cpu_backward,
    )  # fmt: skip
    q, kv, sums = query.nbytes, 2 * key.nbytes, 4 * 4 * 64
    scores = 4 * 64 * 64
    for causal, share in ((True, 0.5), (False, 1.0)):
        out: list[Tensor] = []
        work = one(lambda causal=causal, out=out: out.extend(forward(query, key, value, 0.0, causal, scale=0.25)))
        flops = share * 2 * 2 * scores * 16
        assert work == Work(flops=flops, bytes=q + kv + q + sums, side=16, keys=64)
        back = one(lambda c=causal, o=out: backward(query, query, key, value, o[0], o[1], 0.0, c, scale=0.25))
        assert back.flops == 2.5 * flops and back.keys == 64
        assert back.bytes == q + kv + q + sums + q + kv  # the gradient of the output is the query here: read once
    assert one(lambda: forward(query, key, value, scale=0.25)).flops == 4 * scores * 16  # causal only where it is said


def test_attention_on_a_card() -> None:
    query = torch.zeros(1, 4, 64, 16, dtype=torch.bfloat16, device="meta")
    forward = ATEN._scaled_dot_product_efficient_attention
    work = one(lambda: forward(query, query, query, None, True, 0.0, True, scale=0.25))
    assert (work.flops, work.dtype, work.keys) == (0.5 * 4 * 4 * 64 * 64 * 16, "bf16", 64)
    out, sums, seed, offset = forward(query, query, query, None, True, 0.0, True, scale=0.25)
    backward = ATEN._scaled_dot_product_efficient_attention_backward
    mask = [True, True, True, False]
    back = one(lambda: backward(out, query, query, query, None, out, sums, seed, offset, 0.0, mask, True, scale=0.25))
    assert back.flops == 2.5 * work.flops
    flash = ATEN._scaled_dot_product_flash_attention.default
    assert work_of(flash, (query, query, query, 0.0, True), {}, (out,)).flops == work.flops


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.view(2, -1).t()[0].detach(),
        lambda x: x.expand(3, 4, 8).unsqueeze(0).transpose(0, 1),
        lambda x: x.split(2),
        lambda x: torch.empty_like(x),
        lambda x: x.new_empty(5).resize_(7),
        lambda x: torch.empty_strided((2, 2), (1, 2), device=x.device),
        lambda x: ATEN._unsafe_view(x, (8, 4)),
        lambda x: torch.promote_types(x.dtype, torch.float64),
    ],
)
def test_views_and_room_cost_nothing(device: str, run: Callable[[Tensor], object]) -> None:
    x = fp32(device, 4, 8)
    assert noted(lambda: run(x)) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("run", "elements"),
    [
        (lambda x, y: x + y, 3 * 32),
        (lambda x, y: x * x, 2 * 32),  # a tensor times itself is read once
        (lambda x, y: x + y[0], 2 * 32 + 8),
        (lambda x, y: x * y[:, :1].expand(4, 8), 2 * 32 + 4),  # a broadcast number counts once
        (lambda x, y: x.add_(y), 3 * 32),
        (lambda x, y: x.mul_(2.0), 2 * 32),
        (lambda x, y: x.copy_(y), 2 * 32),  # what is overwritten is not read
        (lambda x, y: x[:2].copy_(y[2:]), 2 * 16),
        (lambda x, y: x.zero_(), 32),
        (lambda x, y: torch.zeros(4, 8, device=x.device), 32),
        (lambda x, y: x.sum(), 33),
        (lambda x, y: torch.cat([x[:1], x[1:], y]), 2 * 64),
        (lambda x, y: x.clone(), 2 * 32),
        (lambda x, y: torch.add(x, y, out=y), 3 * 32),
        (lambda x, y: torch.where(x > 0, x, y), 32 + 8 + 8 + 3 * 32),  # a boolean takes a quarter
    ],
)
def test_everything_else_goes_by_its_bytes(device: str, run: Callable[[Tensor, Tensor], object], elements: int) -> None:
    x, y = fp32(device, 4, 8), fp32(device, 4, 8)
    works = noted(lambda: run(x, y))
    assert sum(work.bytes for work in works) == 4 * elements
    assert not any(work.flops for work in works)


@pytest.mark.parametrize("device", DEVICES)
def test_gathering_reads_what_is_asked_for_and_not_the_table(device: str) -> None:
    table, index = fp32(device, 1000, 8), torch.zeros(3, dtype=torch.int64, device=device)
    moved = 3 * 8 + 2 * (3 * 8 * 4)
    assert one(lambda: table.index_select(0, index)).bytes == moved
    assert one(lambda: torch.nn.functional.embedding(index, table)).bytes == moved
    assert one(lambda: table[index]).bytes == moved
    assert one(lambda: table[:3].gather(0, index[:, None])).bytes == 3 * 8 + 2 * 3 * 4
    rows = fp32(device, 3, 8)
    put = 3 * 8 + rows.nbytes + 2 * rows.nbytes
    assert one(lambda: table.index_add_(0, index, rows)).bytes == put
    assert one(lambda: table.index_copy_(0, index, rows)).bytes == put
    assert one(lambda: table.scatter_add_(0, index[:, None].expand(3, 8), rows)).bytes == put


@pytest.mark.parametrize("device", DEVICES)
def test_a_16_bit_side_names_the_dtype(device: str) -> None:
    x = fp32(device, 4, 8)
    narrow = one(lambda: x.to(torch.bfloat16))
    assert narrow == Work(bytes=4 * 32 + 2 * 32, dtype="bf16")
    wide = x.to(torch.float16)
    assert one(lambda: wide.float()).dtype == "fp16"
    assert one(lambda: x.copy_(wide)).dtype == "fp16"
    assert one(lambda: wide @ wide.t()).dtype == "fp16"


FIGURES = Roofline(
    matmul_flops={"fp32": 1000.0, "bf16": 4000.0}, attention_flops={"fp32": 500.0}, short_flops={"fp32": 125.0},
    bandwidth_bytes_per_s=100.0, narrow_bytes_per_s=50.0, per_operation_s=0.25,
    kernels={"nf4 fp32": Kernel(call_s=0.5, numbers_per_s=10.0)}, source="made up", measured=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Work(bytes=200), 2.25),
        (Work(bytes=200, dtype="bf16"), 4.25),
        (Work(bytes=200, operations=4), 3.0),
        (Work(flops=3000, bytes=200, rows=8, side=8), 3.25),  # its arithmetic takes longer
        (Work(flops=1000, bytes=200, rows=8, side=8), 2.25),  # its memory does
        (Work(flops=8000, dtype="bf16", rows=8, side=8), 2.25),
        (Work(flops=8000, dtype="fp16", rows=8, side=8), 8.25),  # no figure: as the slowest
        (Work(flops=1000, side=64, keys=512), 2.25),
        (Work(flops=1000, side=64, keys=64), 8.25),
        (Work(flops=4000, dtype="bf16", side=64, keys=64), 1.25),  # no figure for attention: as products
        (Work(bytes=10**6, kernel="nf4 fp32", numbers=40), 4.5),
        (Work(bytes=100, kernel="nf4 bf16", numbers=40), 1.25),
        (NOTHING, 0.0),
    ],
)
def test_seconds(work: Work, seconds: float) -> None:
    assert Clock(FIGURES).seconds(work) == pytest.approx(seconds, rel=1e-12)


def test_the_ledger_sums_up_by_section() -> None:
    x = fp32("meta", 4, 8)
    with Ledger(roofline=FIGURES) as ledger:
        x.view(-1)
        assert ledger.seconds == 0
        ledger.mark("one")
        x + x
        ledger.mark("two", 3)
        x.mul_(2)
        x.mul_(2)
        declare_work(Work(bytes=50))
        assert ledger.seconds == pytest.approx(3 * (2.56 + 0.25) + 0.75)
        sections = ledger.cut()
        assert [section.seconds for section in sections] == pytest.approx([0, 2.81, 2 * 2.81 + 0.75])
        ledger.start_over()
        assert ledger.seconds == 0


def test_memory_that_must_be_found_takes_time_by_its_size() -> None:
    roofline = Roofline(
        matmul_flops={"fp32": 1e30}, bandwidth_bytes_per_s=1e30, per_operation_s=0.0, fresh_bytes_per_s=1024.0,
        fresh_from_bytes=4096, source="a KiB a second", measured=False,
    )  # fmt: skip
    there = torch.zeros(4096)
    with Ledger(roofline=roofline) as ledger:
        ledger.adopt((there, torch.zeros(8)), Category.BASE)
        torch.empty(1023)
        assert ledger.seconds == pytest.approx(0, abs=1e-12)  # small, and gone
        x = torch.empty(1024)
        x.add_(1).view(-1)
        assert ledger.seconds == pytest.approx(4)
        with repeated(3):
            torch.ones(2048, device="meta")
        assert ledger.seconds == pytest.approx(4 + 3 * 8)
        ledger.mark("stays")
        stays = [torch.ones(512, device="meta"), torch.ones(256, device="meta")]
        del stays[0]
        ledger.mark("goes")
        del stays[0]
        assert [section.seconds for section in ledger.cut()] == pytest.approx([28, 1, 0], abs=1e-9)


def test_without_a_roofline_no_time_is_counted() -> None:
    with Ledger() as ledger:
        torch.ones(8) @ torch.ones(8)
        declare_work(Work(bytes=8))
        assert ledger.seconds == 0
    declare_work(Work(bytes=8))  # nobody counts: nothing happens
    with repeated(3):
        pass


def test_a_turn_that_stands_for_others_takes_their_time_and_not_their_room() -> None:
    with Ledger(roofline=CALLS) as ledger:
        with repeated(3), repeated(2):
            x = torch.zeros(256, device="meta")
        assert ledger.seconds == 6 and ledger.now == x.nbytes
        x.add_(1)
        assert ledger.seconds == 7


@pytest.mark.parametrize("count", [0, 1, 3, 4, 17])
def test_abridged_turns_take_the_time_of_all(count: int) -> None:
    def loop() -> float:
        with Ledger(roofline=CALLS) as ledger:
            walked = list(turns(range(0, 10 * count, 10), torch.device("meta")))
            assert len(walked) == min(count, 3)
            for _ in turns(range(0, 10 * count, 10), torch.device("meta")):
                torch.zeros(8, device="meta")
            return ledger.seconds

    assert loop() == count
    with in_full():
        assert list(turns(range(count), torch.device("meta"))) == list(range(count))


def stored(kind: type[Int8] | type[Nf4], device: str) -> Storage:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    return kind.quantize(weight.to(device))


@pytest.mark.parametrize("kind", [Int8, Nf4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("road", ["plain", "bitsandbytes"])
def test_an_expansion_on_meta_declares_what_a_device_does(
    monkeypatch: pytest.MonkeyPatch, kind: type[Int8] | type[Nf4], dtype: torch.dtype, road: str
) -> None:
    loads = "ms against" in bitsandbytes_kernels.kernel_choice()  # asked before the roads are forced: it loads it
    theirs = road == "bitsandbytes" and loads
    monkeypatch.setattr(bitsandbytes_kernels, "serves", lambda *_: theirs)
    monkeypatch.setattr(nf4_codes, "_TILES", {"cpu": 1024})  # several tiles, the last one shorter
    monkeypatch.setattr(int8, "_TILE_CPU", 10 * 64)
    for roofline in (BYTES, CALLS):
        spent = []
        for device in DEVICES:
            storage = stored(kind, device)
            with Ledger(roofline=roofline) as ledger:
                storage.dense(dtype)
            spent.append(ledger.seconds)
        assert spent[0] == pytest.approx(spent[1], rel=1e-12) and spent[0] > 0


@pytest.mark.parametrize("kind", [Int8, Nf4])
def test_an_expansion_with_a_speed_of_its_own_goes_by_its_numbers(kind: type[Int8] | type[Nf4]) -> None:
    name = kernel_name(kind.kind, torch.bfloat16)
    roofline = Roofline(
        matmul_flops={"fp32": 1e30}, bandwidth_bytes_per_s=1e30, per_operation_s=0.0,
        kernels={name: Kernel(call_s=0.0, numbers_per_s=1.0)},
        source="a number a second", measured=False,
    )  # fmt: skip
    storage = stored(kind, "meta")
    with Ledger(roofline=roofline) as ledger:
        storage.dense(torch.float32)
        assert ledger.seconds < 1e-12
        storage.dense(torch.bfloat16)
    assert ledger.seconds == pytest.approx(96 * 64)


@pytest.mark.parametrize("device", DEVICES)
def test_time_leaves_the_bytes_alone(device: str) -> None:
    def peaks(roofline: Roofline | None) -> tuple[int, dict[Category, int]]:
        with Ledger(roofline=roofline) as ledger:
            x = torch.ones(64, 64, device=device)
            (x @ x).exp_().sum()
        return ledger.peak.live_bytes, ledger.peak.by_category

    assert peaks(None) == peaks(FIGURES)
