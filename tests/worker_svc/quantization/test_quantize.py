"""Weights that are quantized while loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.worker_svc.harness import save_model, worker_settings
from tests.worker_svc.kernels.cpu.eager_ops import alone
from tests.worker_svc.quantization import writers
from tests.worker_svc.quantization.test_checkpoints import load_codes
from tests.worker_svc.quantization.writers import SHAPE, save_quantized
from tests.worker_svc.thread_ranks import on_ranks
from worker_svc.errors import ModelError
from worker_svc.kernels.cpu import ops as cpu_ops
from worker_svc.kernels.cpu.structs import Kind
from worker_svc.kernels.cpu.weights import PanelWeight
from worker_svc.kernels.cpu_features import has
from worker_svc.layers.embedding import VocabParallelEmbedding, VocabParallelHead, VocabPartition
from worker_svc.layers.linear import RowParallelLinear
from worker_svc.loader import Rows, WeightLoader
from worker_svc.model_runner import ModelRunner
from worker_svc.ranks.distributed import TensorParallel
from worker_svc.weights.files import WeightReader
from worker_svc.weights.quantization import quantize as quantization
from worker_svc.weights.quantization.choice import Choice
from worker_svc.weights.quantization.formats import Format
from worker_svc.weights.quantization.quantize import group_size, quantize

FORMATS: list[Format] = ["int8", "int4", "fp8"]
CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(weight: torch.Tensor, format: Format) -> float:
    return float((quantize(weight, format).dequantized() - weight).norm() / weight.norm())


def test_codes_are_within_half_a_step() -> None:
    weight = random(50, 70)
    maxima = weight.abs().amax(dim=1, keepdim=True)
    int8 = quantize(weight, "int8")
    assert int8.codes.abs().amax(dim=1).eq(127).all()
    assert ((int8.dequantized() - weight).abs() <= maxima / 127 * 0.5001).all()
    wide = random(50, 256)
    int6 = quantize(wide, "int6")
    groups = wide.view(50, 2, 128)
    steps = groups.abs().amax(dim=2, keepdim=True) / 31
    assert ((int6.dequantized().view_as(groups) - groups).abs() <= steps * 0.5001).all()
    fp8 = quantize(weight, "fp8")
    # Three bits of mantissa, and below the smallest normal number the steps of the subnormal ones.
    bound = torch.maximum(weight.abs() / 16, maxima / 448 * 2**-10) * 1.0001
    assert ((fp8.dequantized() - weight).abs() <= bound).all()


def test_int4_loses_less_than_other_scales() -> None:
    """Weights are normally distributed; the usual scale is the largest magnitude over 7."""
    weight = random(64, 1024)
    groups = weight.view(-1, 128)
    scales = groups.abs().amax(dim=1, keepdim=True) / 7
    usual = (groups / scales).round() * scales
    ours, theirs = relative_error(weight, "int4"), float((usual - groups).norm() / groups.norm())
    print(f"{ours:.4f} of the norm, {theirs:.4f} with the usual scale")
    assert ours < 0.099 < 0.115 < theirs


@pytest.mark.parametrize(("inputs", "size"), [(1024, 128), (192, 64), (96, 32)])
def test_int4_groups_are_as_large_as_possible(inputs: int, size: int) -> None:
    assert group_size(inputs) == size
    assert quantize(random(3, inputs), "int4").group_size == size


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_and_outliers(format: Format) -> None:
    weight = torch.zeros(5, 64)
    weight[1, 7], weight[2, 8], weight[3] = 1e30, -1e-38, 1.0
    found = quantize(weight, format).dequantized()
    assert found.isfinite().all()
    assert torch.equal(found[0], weight[0])
    torch.testing.assert_close(found[[1, 3]], weight[[1, 3]])


@pytest.mark.parametrize("format", FORMATS)
def test_rows_do_not_depend_on_each_other(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(40, 128)
    whole = quantize(weight, format).dequantized()
    monkeypatch.setitem(quantization._PIECES, "cpu", 7 * 128)
    assert torch.equal(quantize(weight, format).dequantized(), whole)
    assert torch.equal(quantize(weight[3:4], format).dequantized(), whole[3:4])


@pytest.mark.skipif(not has("avx2"), reason="torch adds up in another order")
@pytest.mark.parametrize("format", ["int8", "int6", "int4"])
@pytest.mark.parametrize("inputs", [1024, 192, 96])
def test_a_cpu_quantizes_as_torch_does_to_the_last_bit(format: Format, inputs: int) -> None:
    weight = random(100, inputs)
    weight[1], weight[2, 8], weight[3], weight[4, ::3] = 0, 1e30, 1e-38, 3e-39
    expected, found = quantize(weight, format), cpu_ops.quantize(weight, format)
    assert torch.equal(found.scales, expected.scales)
    assert torch.equal(found.codes, expected.codes)


def test_embedding_and_head_have_more_bits_than_int4(tmp_path: Path) -> None:
    """A tied one exists once, others have scales of their own."""
    for tied in (True, False):
        save_model(tmp_path, tie_word_embeddings=tied, **SHAPE)
        for format in FORMATS:
            model = ModelRunner(worker_settings(tmp_path, quantization=format))._model.decoder
            table, head = model.embed_tokens.weight, model.lm_head._weight
            assert isinstance(table, PanelWeight)
            assert isinstance(head, PanelWeight)
            assert (table is head) == tied
            assert table.kind == head.kind == (Kind.INT6 if format == "int4" else Kind.INT8)


def test_the_setting_also_quantizes_embedding_and_head_of_a_quantized_checkpoint(
    tmp_path: Path,
) -> None:
    save_quantized(tmp_path, writers.FORMATS["W4A16"])
    made = {}
    for setting in ("auto", "int4", "int4"):  # the last one reads packed weights
        runner = ModelRunner(worker_settings(tmp_path, quantization=setting))
        model = runner._model.decoder
        table, head = model.embed_tokens.weight, model.lm_head._weight
        if setting == "int4":
            assert isinstance(table, PanelWeight)
            assert isinstance(head, PanelWeight)
            assert table.kind == head.kind == Kind.INT6
        made[setting] = model.layers[0].attention.qkv_proj._weight.state(), runner.info.fingerprint
    (plain, its_name), (quantized, other_name) = made.values()
    assert all(torch.equal(plain[part], quantized[part]) for part in plain)
    assert its_name != other_name


def test_inputs_that_no_group_divides_are_rejected(tmp_path: Path) -> None:
    save_model(tmp_path)  # its intermediate_size is 112
    with pytest.raises(ModelError, match=r"quantization: int4 .* of 32 inputs, a layer has 112"):
        ModelRunner(worker_settings(tmp_path, quantization="int4"))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_have_the_codes_of_one(tmp_path: Path, format: Format, ranks: int) -> None:
    """Rows and columns are cut alike, even where a rank's boundary cuts a group."""
    save_file(
        {"x.weight": random(24, 384), "y.weight": random(24, 384, seed=1)},
        tmp_path / "x.safetensors",
    )
    choice = Choice(quantize_to=format)
    both = [Rows("x", 0, 24), Rows("y", 0, 24)]
    whole = load_codes(tmp_path, choice, both, 384).dequantized()
    rows, columns = 24 // ranks, 384 // ranks
    for rank in range(ranks):
        parts = [Rows(name, rank * rows, rows) for name in "xy"]
        part = load_codes(tmp_path, choice, parts, 384)
        ends = slice(rank * rows, (rank + 1) * rows)
        assert torch.equal(part.dequantized(), torch.cat((whole[:24][ends], whole[24:][ends])))

        place = range(rank * columns, (rank + 1) * columns)
        part = load_codes(tmp_path, choice, both[:1], 384, place)
        assert torch.equal(part.dequantized(), whole[:24, place.start : place.stop])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_together_multiply_as_one(tmp_path: Path, format: Format, ranks: int) -> None:
    """They agree on each row's largest magnitude, so that their 8-bit inputs are those of one."""
    weight, x = random(24, 384), random(7, 384, seed=1)
    save_file({"x.weight": weight}, tmp_path / "x.safetensors")
    x[3] = 0

    def multiply(tp: TensorParallel) -> torch.Tensor:
        with WeightReader(tmp_path, torch.float32, CPU) as reader:
            loader = WeightLoader(reader, cpu_ops, Choice(quantize_to=format))
            linear = RowParallelLinear(loader, tp, "x", 384, 24, bias=False)
        return alone(linear, x.chunk(tp.size, dim=1)[tp.rank].contiguous(), tp=tp)

    (one,) = on_ranks(1, multiply)
    # Sums of 384 products, in another order.
    rounding = 4 * torch.finfo(torch.float32).eps * (x.abs() @ weight.abs().T)
    for several in on_ranks(ranks, multiply):
        assert ((several - one).abs() <= rounding).all()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_vocabulary_of_ranks(tmp_path: Path, ranks: int) -> None:
    """Each has its own rows, quantized as one rank would, and zeros where they end; the last of
    four has none at all."""
    save_file({"x.weight": random(40, 64)}, tmp_path / "x.safetensors")
    ids, none = torch.arange(40, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    expected = quantize(random(40, 64), "int6").dequantized()

    def look_up(tp: TensorParallel) -> tuple[torch.Tensor, torch.Tensor]:
        vocab = VocabPartition(40, tp.rank, tp.size)
        with WeightReader(tmp_path, torch.bfloat16, CPU) as reader:
            loader = WeightLoader(reader, cpu_ops, Choice(quantize_to="int4"))
            table = VocabParallelEmbedding(loader, cpu_ops, tp, vocab, "x", 64)
        hidden = alone(table, ids, none, tp=tp)
        logits = VocabParallelHead(loader.tied_head(table.weight))(hidden)
        assert logits.shape == (40, vocab.shard_size)
        return hidden, logits[:, : vocab.num_tokens]

    results = on_ranks(ranks, look_up)
    for hidden, _ in results:
        assert hidden.dtype == torch.float32  # as steps on a CPU compute
        assert torch.equal(hidden, expected)
    logits = torch.cat([each for _, each in results], dim=1)
    torch.testing.assert_close(logits, expected @ expected.T, rtol=0.02, atol=1)
