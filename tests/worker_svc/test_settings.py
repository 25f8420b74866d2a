from __future__ import annotations

import pytest

from shared.config import SettingsError, load_settings
from worker_svc.devices.cpu import CACHE_SHARE, CpuPlatform
from worker_svc.devices.cuda import MEMORY_SHARE, CudaPlatform
from worker_svc.settings import WorkerSettings


def test_where_ranks_meet_is_known_from_the_usual_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def where() -> tuple[str, int]:
        settings = load_settings(WorkerSettings, [])
        return settings.master_addr, settings.master_port

    assert where() == ("127.0.0.1", 50054)
    monkeypatch.setenv("MASTER_ADDR", "gpu-a")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert where() == ("gpu-a", 1234)
    monkeypatch.setenv("NANO_MASTER_ADDR", "gpu-b")
    assert where() == ("gpu-b", 1234)
    monkeypatch.setenv("MASTER_PORT", "ten")
    with pytest.raises(SettingsError, match=r"master_port: .*'ten'"):
        where()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-num-seqs", "0"], r"max_num_seqs: .*greater than 0.*'0'"),
        (["--rank", "3"], r"rank: 3 is not below tp x pp, which is 1"),
        (["--tp", "2"], r"worker_addresses: 1 given, tp x pp is 2"),
        (["--pp", "9"], r"pp: .*less than or equal to 8"),
        (["--pp-layers", "3,0"], r"pp_layers: .*'3,0'"),
        (
            ["--pp", "2", "--worker-addresses", "a:1,b:2", "--speculation", "ngram"],
            r"speculation: n",
        ),
        (["--device", "tpu"], r"device: .*'cpu' or 'cuda'.*'tpu'"),
        (["--memory-utilization", "1.5"], r"memory_utilization: 1.5 is not in \(0, 1\]"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], r"max_num_seqs: 64 .*32"),
        (["--kv-blocks", "many"], r"kv_blocks: .*'many'"),
    ],
)
def test_impossible_values_are_named(args: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(WorkerSettings, args)


def test_addresses_are_split_at_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANO_WORKER_ADDRESSES", "unix:a.sock,host:2")
    monkeypatch.setenv("NANO_TP", "2")
    assert load_settings(WorkerSettings, []).worker_addresses == ("unix:a.sock", "host:2")


def test_help_says_what_auto_is_on_each_device() -> None:
    fields = WorkerSettings.model_fields
    tokens = fields["max_num_batched_tokens"].description or ""
    for platform in (CpuPlatform, CudaPlatform):
        assert f"{platform.num_batched_tokens} on a" in tokens
    share = fields["memory_utilization"].description or ""
    for value in (CACHE_SHARE, MEMORY_SHARE):
        assert f"(auto: {value})" in share
