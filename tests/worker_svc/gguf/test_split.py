"""GGUF files in parts, and directories that hold GGUF files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from deploy.errors import LaunchError
from deploy.model import model_name, resolve_model
from tests.gguf_files import split_gguf, write_gguf
from tests.worker_svc.gguf.test_unpack import SHAPE, refusal

PARTS = (slice(0, 4), slice(4, 5), slice(5, None))
NAMES = [f"small-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "small.gguf"
    write_gguf(path, LlamaForCausalLM(LlamaConfig(**SHAPE)))
    return path


def test_any_part_stands_for_the_model(whole: Path) -> None:
    single = resolve_model(str(whole))
    parts = split_gguf(whole, PARTS)
    assert [each.name for each in parts] == NAMES
    whole.unlink()
    directories = {resolve_model(str(each)) for each in (*parts, whole.parent)}
    (directory,) = directories
    assert model_name(str(parts[1]), directory) == "small"
    assert model_name(str(whole.parent), directory) == "models"
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (directory / name).read_text() == (single / name).read_text()
    index = json.loads((directory / "model.gguf.json").read_text())
    before = json.loads((single / "model.gguf.json").read_text())
    assert index.keys() == before.keys()
    for name, entry in index.items():
        assert (entry["type"], entry["shape"]) == (before[name]["type"], before[name]["shape"])
    links = {each.name: each.readlink() for each in directory.iterdir() if each.is_symlink()}
    assert list(map(links.get, sorted(links))) == parts
    assert {entry["file"] for entry in index.values()} == links.keys()


def test_a_changed_part_is_another_model(whole: Path) -> None:
    parts = split_gguf(whole, PARTS)
    before = resolve_model(str(parts[0]))
    parts[2].write_bytes(parts[2].read_bytes())
    assert resolve_model(str(parts[0])) != before


def test_the_first_part_may_have_no_tensors(whole: Path) -> None:
    first, second = split_gguf(whole, [slice(0), slice(None)])
    index = json.loads((resolve_model(str(second)) / "model.gguf.json").read_text())
    assert {entry["file"] for entry in index.values()} == {"model-00002-of-00002.gguf"}
    assert resolve_model(str(first)) == resolve_model(str(second))


def test_one_part_of_one_is_a_whole_file(whole: Path) -> None:
    (part,) = split_gguf(whole, [slice(None)])
    named = whole.rename(whole.with_name("plain-00001-of-00001.gguf"))
    for path in (part, named):
        assert (resolve_model(str(path)) / "model.gguf").readlink() == path


def test_links_to_parts(whole: Path, tmp_path: Path) -> None:
    """Links are those of Hugging Face's cache, or one that a user made."""
    parts = split_gguf(whole, PARTS)
    (tmp_path / "link.gguf").symlink_to(parts[0])
    assert resolve_model(str(tmp_path / "link.gguf")) == resolve_model(str(parts[0]))
    (tmp_path / "snapshot").mkdir()
    for number, part in enumerate(parts):
        blob = part.rename(part.with_name(f"blob{number}"))
        (tmp_path / "snapshot" / part.name).symlink_to(blob)
    directory = resolve_model(str(tmp_path / "snapshot" / parts[1].name))
    assert (directory / "model-00003-of-00003.gguf").read_bytes()


@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("named", [0, 1, 2, None])
def test_a_missing_part_is_named(whole: Path, missing: int, named: int | None) -> None:
    parts = split_gguf(whole, PARTS)
    whole.unlink()
    parts[missing].unlink()
    if named == missing:
        return
    model = whole.parent if named is None else parts[named]
    assert f"{NAMES[missing]} is missing" in refusal(model)


def test_several_missing_parts_are_counted(whole: Path) -> None:
    parts = split_gguf(whole, PARTS)
    for part in parts[1:]:
        part.unlink()
    assert refusal(parts[0]) == f"part 1 of 3; {NAMES[1]} and 1 more is missing beside it"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({0: {"no": 1}}, f"{NAMES[0]}: split.no: 1, but by its name it is 0"),
        ({2: {"no": 1}}, f"{NAMES[2]}: split.no: 1, but by its name it is 2"),
        ({1: {"no": None}}, f"{NAMES[1]}: split.no: 0, but by its name it is 1"),
        ({1: {"count": 4}}, f"{NAMES[1]}: split.count: 4, but its name says 3"),
        ({0: {"count": None}}, f"{NAMES[0]}: split.count: 1, but its name says 3"),
        (
            {1: {"tensors.count": 12}},
            f"{NAMES[1]}: split.tensors.count: 12, but all parts have 11",
        ),
    ],
)
def test_parts_must_be_what_their_names_say(
    whole: Path, changes: dict[int, dict[str, int | None]], reason: str
) -> None:
    assert refusal(split_gguf(whole, PARTS, changes)[1]) == reason


def test_a_part_of_another_name_is_refused(whole: Path) -> None:
    part = split_gguf(whole, PARTS)[0].rename(whole.with_name("renamed.gguf"))
    assert refusal(part) == ("split.count: 3; name the parts NAME-00001-of-00003.gguf and so on")


@pytest.mark.parametrize("name", ["m-00000-of-00002", "m-00003-of-00002", "m-00001-of-99999"])
def test_impossible_parts_are_refused(whole: Path, name: str) -> None:
    path = whole.rename(whole.with_name(f"{name}.gguf"))
    assert "is not one of 1 to 1024 parts" in refusal(path)


def test_a_tensor_in_two_parts_is_refused(whole: Path) -> None:
    parts = split_gguf(whole, (slice(0, 5), slice(4, 5), slice(5, None)))
    reason = refusal(parts[0])
    assert reason.endswith(f": the tensor is in both {NAMES[0]} and {NAMES[1]}")


def test_a_part_that_is_cut_short_is_named(whole: Path) -> None:
    parts = split_gguf(whole, PARTS)
    parts[2].write_bytes(parts[2].read_bytes()[:-1])
    assert refusal(parts[0]).startswith(f"{NAMES[2]}: ")


def test_a_directory_of_several_models_names_them(whole: Path) -> None:
    split_gguf(whole, PARTS)
    with pytest.raises(LaunchError) as error:
        resolve_model(str(whole.parent))
    assert str(error.value) == (
        f"MODEL: {whole.parent} has several models: {NAMES[0]}, small.gguf; use the path of one"
    )


def test_a_directory_of_other_weights_is_taken_as_it_is(whole: Path) -> None:
    (whole.parent / "config.json").write_text("{}")
    assert resolve_model(str(whole.parent)) != whole.parent
    (whole.parent / "model.safetensors").touch()
    assert resolve_model(str(whole.parent)) == whole.parent


def test_what_was_unpacked_is_taken_as_it_is(whole: Path) -> None:
    directory = resolve_model(str(split_gguf(whole, PARTS)[0]))
    assert resolve_model(str(directory)) == directory
