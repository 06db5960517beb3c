"""Whose choices a device takes."""

from impls.support import tuned


def test_a_device_takes_its_own_choices_and_without_any_the_h200s(tmp_path):
    assert tuned.nearest(tmp_path, "NVIDIA H100 PCIe") == tmp_path / "tuned" / "h200.json"
    own = tuned.file(tmp_path, "NVIDIA H100 PCIe")
    own.parent.mkdir()
    own.write_text("{}")
    assert tuned.nearest(tmp_path, "NVIDIA H100 PCIe") == own == tmp_path / "tuned" / "h100-pcie.json"
