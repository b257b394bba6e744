"""Errors for a machine on which CUDA shows no GPU: each names the cause and what to do about it."""

import ctypes
from types import SimpleNamespace

import pytest

from memfit.card.detect_card import detect_card
from memfit.errors import UnsuitableEnvironmentError

NO_DEVICE, DRIVER_MISMATCH = 100, 803


def refused(monkeypatch, status):
    """Return the error on a machine whose driver initializes with a status."""
    driver = SimpleNamespace(cuInit=lambda _: status, cuDeviceGetCount=lambda _: 0)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    with pytest.raises(UnsuitableEnvironmentError) as error:
        detect_card("look")
    return str(error.value)


def test_a_variable_that_hides_all_gpus_is_named_and_can_be_unset(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert refused(monkeypatch, NO_DEVICE) == (
        "Cannot look without a GPU: CUDA_VISIBLE_DEVICES='7' selects no GPU on this machine. "
        "Change or unset it, or use memfit dry-run, which needs no GPU."
    )


def test_a_driver_that_fails_is_to_be_checked(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert refused(monkeypatch, DRIVER_MISMATCH) == (
        "Cannot look without a GPU: the NVIDIA driver failed to initialize (CUDA error 803). "
        "Check the driver with nvidia-smi. Use a machine with a GPU, or memfit dry-run, which needs no GPU."
    )
