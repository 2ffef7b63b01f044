"""Where it is decided what runs, and with which configuration."""

import os

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: executor)")
pytest.importorskip("triton", reason="triton is not installed (extra: executor)")

import yaml  # noqa: E402

from kernels import backend, checks, config, launches, state  # noqa: E402
from kernels.backend import Backend  # noqa: E402

CPU = torch.zeros(1)


def test_a_cpu_tensor(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert backend.resolve(CPU) == Backend("torch")
    assert backend.resolve(CPU, "compiled") == Backend("torch", compiled=True)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        backend.resolve(CPU, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.resolve(CPU) == backend.resolve(CPU, "triton") == Backend("triton", False, True)
    assert backend.resolve(CPU, "torch") == Backend("torch")


class OnCuda:
    """Looks like a CUDA tensor as far as the choice of a backend looks."""

    is_cuda = True
    device = "cuda:0"


def test_a_cuda_tensor(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert backend.resolve(OnCuda()) == Backend("triton", device="NVIDIA H200")
    assert backend.resolve(OnCuda(), cuda="torch") == Backend("torch")
    assert backend.resolve(OnCuda(), "triton", cuda="torch").triton
    assert backend.resolve(OnCuda(), "compiled").compiled


def test_products_are_fp32_in_the_interpreter_only():
    assert Backend("triton", interpreted=True).dot(torch.bfloat16) == torch.float32
    assert Backend("triton", device="NVIDIA H200").dot(torch.bfloat16) == torch.bfloat16


def test_rows_go_by_device_and_size():
    h200 = Backend("triton", device="NVIDIA H200 141GB")
    assert config.row(h200, "ssd_update", 64) == {"BLOCK_P": 4, "num_warps": 1}
    assert config.row(h200, "ssd_update", 100_000) == {"BLOCK_P": 8, "num_warps": 1}
    first = config.tables()["generic"]["operations"]["ssd_update"][0]
    interpreted = config.row(Backend("triton", interpreted=True), "ssd_update", 100_000)
    assert interpreted == {k: v for k, v in first.items() if k != "up_to"}
    # What a device's file leaves out comes from the generic one.
    assert config.row(h200, "state_move", 1) == config.row(Backend("triton"), "state_move", 1)


def test_every_table_is_whole():
    for name, file in config.tables().items():
        for operation, rows in file["operations"].items():
            assert operation in config.tables()["generic"]["operations"], (name, operation)
            limits = [row.get("up_to") for row in rows]
            assert limits[-1] is None and None not in limits[:-1]
            assert limits[:-1] == sorted(limits[:-1])
            for row in rows:
                blocks = [v for k, v in row.items() if k.startswith("BLOCK") or k == "num_warps"]
                assert blocks and all(v & (v - 1) == 0 and v > 0 for v in blocks)


def test_tables_are_plain_data():
    for path in config.FOLDER.glob("*.yaml"):
        assert set(yaml.safe_load(path.read_text())) == {"matches", "operations"}


@pytest.mark.parametrize("value,covering", [(1, 16), (16, 16), (17, 32), (1000, 64), (0, 16)])
def test_power_of_two_within_limits(value, covering):
    assert config.power(value, 16, 64) == covering


def test_a_recorded_launch_computes_nothing():
    pool, slots = torch.ones(3, 40), torch.tensor([0, 1])
    target = torch.zeros(3, 40)
    with launches.recording("NVIDIA H200") as found:
        state.copy(pool, target, slots, slots)
    assert [each.grid for each in found] == [(2, 1)] and not target.any()
    state.copy(pool, target, slots, slots)
    assert target[:2].all()


def test_the_poison_works():
    whole = checks.poisoned(torch.ones(2, 3), 1, 2)
    assert whole.shape == (2, 3) and whole.is_contiguous()
    assert torch.as_strided(whole, (3,), (1,), 0).isnan().all()
    assert checks.error(torch.tensor([torch.nan]), torch.ones(1)) == float("inf")
    assert checks.error(torch.tensor([1.0, 2.1]), torch.tensor([1.0, 2.0])) == pytest.approx(0.05)


def test_this_process_runs_what_it_says():
    expected = ("triton", "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else ("torch", "cpu")
    assert checks.runnable()[0] == expected
